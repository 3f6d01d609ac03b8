//! Bounds of the numbers in config.json.

/// Longest context, tokens.
pub const MAX_CONTEXT: usize = 1 << 26;

/// Largest value of a size. Sizes are lengths of tensors and lists, and the bytes of all weights must fit 64 bits. A
/// file with a larger size is refused before anything is allocated.
pub fn max_value(field: &str) -> usize {
    match field {
        "num_hidden_layers" => 1 << 12,
        "num_attention_heads" | "num_key_value_heads" | "linear_num_key_heads" | "linear_num_value_heads" => 1 << 14,
        "head_dim" | "linear_key_head_dim" | "linear_value_head_dim" | "linear_conv_kernel_dim" => 1 << 12,
        // With a shared expert, the most that the kernels take.
        "num_experts" | "num_local_experts" => 1023,
        "num_experts_per_tok" => 31,
        "vocab_size" => 1 << 24,
        "max_position_embeddings" => MAX_CONTEXT,
        _ => 1 << 20,
    }
}
