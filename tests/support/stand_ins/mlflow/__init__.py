"""In place of MLflow: keeps the calls that it gets, under the names that the library has."""
