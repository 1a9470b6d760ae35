"""One run over several hosts: ssh, gcloud and Kubernetes."""
