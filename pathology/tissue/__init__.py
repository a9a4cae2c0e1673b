"""What is on the glass: tissue, pen marks, blur and stains."""
