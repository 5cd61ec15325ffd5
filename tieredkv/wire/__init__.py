"""What any two processes of this package share: frames over a socket, starting and ending."""
