"""What a mask costs an attention: kept softmax mass, and the choice of masks by what they lose."""
