"""The agents' records (see `launch/records.py`), and their presets by machine."""
