//! Plausibility limits for the size of a model that a file describes.

use megatron::config::{ModelConfig, PositionEmbedding};

const MOST_POSITIONS: usize = 1 << 31;

const MOST_PADDING: usize = 1 << 16;

/// Refuses a model that cannot match its tensors, before anything of its size is allocated.
/// `largest` is the largest extent of a tensor, and `layers` the largest possible number of layers.
/// Settings without a matching tensor extent have their own limits.
///
/// # Errors
/// A sentence that names the size.
pub(crate) fn bounded(
    model: &ModelConfig,
    largest: usize,
    layers: usize,
) -> std::result::Result<(), String> {
    if model.num_layers > layers {
        return Err(format!("{} layers, but at most {layers} are supported", model.num_layers));
    }
    if let Some(extent) = extents(model).into_iter().find(|&extent| extent > largest) {
        return Err(format!("a tensor dimension of {extent}, but at most {largest} is supported"));
    }
    let positions = model.seq_length.max(model.max_position_embeddings);
    if positions > MOST_POSITIONS {
        return Err(format!(
            "sequences of {positions} tokens; more than {MOST_POSITIONS} count as a mistake"
        ));
    }
    let multiple = model.make_vocab_size_divisible_by;
    if multiple > MOST_PADDING {
        return Err(format!(
            "a vocabulary padded to {multiple}; more than {MOST_PADDING} counts as a mistake"
        ));
    }
    Ok(())
}

/// Sizes that some tensor of the model must reach in one dimension.
fn extents(model: &ModelConfig) -> Vec<usize> {
    let mut extents = vec![
        model.hidden_size,
        model.ffn_hidden_size,
        model.num_attention_heads,
        model.num_query_groups,
        model.head_dim,
        model.vocab_size,
    ];
    if model.position_embedding == PositionEmbedding::LearnedAbsolute {
        extents.push(model.max_position_embeddings);
    }
    extents
}
