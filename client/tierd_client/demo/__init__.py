"""The rank side of `tierd demo`: a miniature engine that drives a daemon and checks every byte."""
