"""Curves, pages, videos and scores made from the folders of runs."""
