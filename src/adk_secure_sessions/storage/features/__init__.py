"""Optional features, of one or two modules each.  A database without a feature pays nothing for it.

Writes are joined to the search index by the changes of `index_rows`, and to the audit trail by
`audit.running_access`.  Imports and collections are operations of their own.
"""
