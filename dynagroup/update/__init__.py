"""What is one optimizer update made of?"""
