"""Starting the processes of the control plane."""
