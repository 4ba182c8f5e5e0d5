"""Speeds of flodl_fast beside the crate's and those of other libraries, and the gate that keeps them."""
