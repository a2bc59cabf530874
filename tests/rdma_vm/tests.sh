# In the virtual machine: what needs an RDMA device.
xpyd_tests "[transport],[rdma]"
