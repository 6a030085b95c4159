"""What a training framework needs beyond an example, one module per framework.

Nothing is imported here: each module imports its framework, and only whoever uses it needs that.
"""
