"""A web page on which a user steers the dream of a trained world model."""
