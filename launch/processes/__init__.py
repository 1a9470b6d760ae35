"""Processes of nodes: started, watched and restarted."""
