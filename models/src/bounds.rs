//! How large a model may be that a file describes.

use megatron::config::{ModelConfig, PositionEmbedding};

const MOST_POSITIONS: usize = 1 << 31;

const MOST_PADDING: usize = 1 << 16;

/// Refuses a model that cannot be what is there, tensors whose extents are `largest` at most and
/// which are of `layers` layers at most, before anything of its size is made. Settings that no
/// tensor has the size of have limits of their own.
///
/// # Errors
/// A sentence naming the size.
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

/// What some tensor of the model is at least as long as in one dimension.
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
