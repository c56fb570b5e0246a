"""Where ranks compute: threads, devices, and the streams of accelerators."""
