"""One run over several hosts: ssh and gcloud."""
