"""Routing on stock models, without forking one."""
