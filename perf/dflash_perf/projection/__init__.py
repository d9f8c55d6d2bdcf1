"""A plan for people: tables, charts and pages in which no figure passes for a measured one."""
