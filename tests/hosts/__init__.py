"""Two machines, as far as the network and the disk go: namespaces of Linux, in which ranks of one run live."""
