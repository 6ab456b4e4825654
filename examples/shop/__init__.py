"""The example application: a shop that invoices orders and sends receipts."""
