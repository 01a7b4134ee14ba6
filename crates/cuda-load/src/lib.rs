//! libcuda loaded at run time, so that code written against cust links on machines with neither toolkit nor driver.
