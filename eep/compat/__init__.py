"""EEP under the interfaces of other libraries, for programs that are written against them."""
