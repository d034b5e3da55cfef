"""How a rank reaches ranks of other hosts: links, the records that announce them, and mirrors."""
