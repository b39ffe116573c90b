"""What ties isentropic to other libraries; each module needs its library, an extra of this package."""
