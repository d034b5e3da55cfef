"""What the ``eep`` command shows and asks: finding a server, tables for people, operations, completion for shells."""
