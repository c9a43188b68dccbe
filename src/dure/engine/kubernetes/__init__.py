"""Jobs on Kubernetes: an Indexed Job with one pod per node, a headless Service, a Secret; or a JobSet. No torch."""
