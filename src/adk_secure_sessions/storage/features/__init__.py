"""What few databases need: each feature has one or two modules, and costs nothing where it is off.

Writes are joined to the search index by `index_rows.insertion`, `update` and `removal`, and to the
audit trail by `audit.running_access`.  Imports and collections are operations of their own.
"""
