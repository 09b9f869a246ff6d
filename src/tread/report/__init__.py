"""What people look at: tables, figures and the generated pages of the documentation.

Functions here turn settings, families, plans and results into text or pictures, for the command `tread` and for docs/.
They may import the jobs and everything below them; nothing but `cli` imports from here.
"""
