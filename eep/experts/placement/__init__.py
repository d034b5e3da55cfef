"""Which expert lives in which slot. Pure: arrays in, arrays out."""
