//! Documents within samples: where they end, and what of a sample that changes.
//!
//! Source: Megatron-LM `megatron/core/datasets/gpt_dataset.py`, `_get_ltor_masks_and_position_ids`:
//! the token that ends a document belongs to it; the next one is the first of the next document.

use candle_core::{Device, Tensor};
use kernels::tensor::device::upload;

use crate::Result;

/// The token that ends documents, and what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocumentEnds {
    /// Its number in the vocabulary.
    pub token: u32,
    /// The loss at the token itself does not count: what follows a document cannot be foreseen
    /// (`eod_mask_loss`).
    pub mask_loss: bool,
    /// Positions begin at 0 again behind it (`reset_position_ids`).
    pub reset_positions: bool,
    /// Tokens behind it do not see what lies before (`reset_attention_mask`).
    pub reset_attention: bool,
}

/// What the documents of a microbatch change for its layers. The default: nothing.
#[derive(Clone, Debug, Default)]
pub struct Documents {
    /// u32 `[s, b]`: the position of every token within its document; `None`: its position within
    /// the sample.
    pub positions: Option<Tensor>,
    /// u32 `[b, s]`: the position in the sample of the first token that a token sees; `None`: the
    /// sample's first.
    pub first_keys: Option<Tensor>,
}

impl Documents {
    /// The tables that there are, always in the same order.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &Tensor> {
        self.positions.iter().chain(&self.first_keys)
    }

    /// What `f` makes of the tables that there are.
    ///
    /// # Errors
    /// What `f` returns.
    pub(crate) fn map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let table = |table: &Option<Tensor>| table.as_ref().map(&f).transpose();
        Ok(Self { positions: table(&self.positions)?, first_keys: table(&self.first_keys)? })
    }
}

/// [`Documents`] in the making: `[s][b]` and `[b][s]`.
pub(super) struct Tables {
    positions: Option<Vec<u32>>,
    first_keys: Option<Vec<u32>>,
}

impl Tables {
    /// Of a microbatch of `b` samples of `s` tokens, to be filled by [`add`](Self::add).
    pub(super) fn new(ends: Option<DocumentEnds>, s: usize, b: usize) -> Self {
        let room = |needed: fn(&DocumentEnds) -> bool| {
            ends.as_ref().filter(|ends| needed(ends)).map(|_| vec![0; s * b])
        };
        Self {
            positions: room(|ends| ends.reset_positions),
            first_keys: room(|ends| ends.reset_attention),
        }
    }

    /// Finds the documents of sample `column` of `b`, whose inputs are `tokens`.
    pub(super) fn add(&mut self, ends: DocumentEnds, tokens: &[u32], column: usize, b: usize) {
        let mut first = 0;
        for (position, &token) in tokens.iter().enumerate() {
            if let Some(positions) = &mut self.positions {
                positions[position * b + column] = (position - first) as u32;
            }
            if let Some(first_keys) = &mut self.first_keys {
                first_keys[column * tokens.len() + position] = first as u32;
            }
            if token == ends.token {
                first = position + 1;
            }
        }
    }

    /// Brings them to where the layers are computed.
    pub(super) fn upload(self, s: usize, b: usize, device: &Device) -> Result<Documents> {
        let tensor = |table: Option<Vec<u32>>, shape| {
            table.map(|table| upload(table, shape, device)).transpose()
        };
        Ok(Documents {
            positions: tensor(self.positions, (s, b))?,
            first_keys: tensor(self.first_keys, (b, s))?,
        })
    }
}
