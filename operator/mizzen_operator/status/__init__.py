"""The status of a service: conditions, Events and metrics, built from what a reconcile observed and did."""
