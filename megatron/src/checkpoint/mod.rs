//! Checkpoints: one logical state on disk, written under one layout and readable under any other.
//!
//! ```text
//! DIR/latest_checkpointed_iteration.txt    the iteration to resume from
//! DIR/iter_0000100/manifest.json           logical tensors, and the chunks that make them up
//! DIR/iter_0000100/rank_00003.safetensors  what rank 3 owned and wrote
//! ```
//!
//! The manifest lists every logical tensor (name, kind, unpadded shape, dtype) with its chunks.
//! Each chunk names a file, a tensor in it, and the elements of a box of the logical tensor that it
//! holds, with a CRC-32C of their bytes. Loading does not depend on tp, pp or dp: it intersects the
//! elements that a rank needs with those in the chunks ([`load`]). The manifest also carries the
//! trainer's own state as JSON, which this module does not interpret.
//!
//! A checkpoint appears completely or not at all ([`save`]): everything is written to
//! `DIR/.iter_0000100.tmp`, synced, and renamed; the pointer moves last. It can be written while
//! training continues ([`begin`]). Files are untrusted when read: a damaged file gives an error
//! that names it. Only one run at a time may save into a folder ([`lock_folder`]), and older
//! checkpoints can be removed after a newer one is saved ([`remove_old`]).
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use megatron::checkpoint::{latest, load, save};
//! use megatron::comm::{Communicator, threads};
//! use megatron::params::{Elements, Piece, ShardRef, StateKind};
//!
//! # fn main() -> megatron::Result<()> {
//! // One tensor of shape [4, 2], of which each of `ranks` ranks has equally many rows.
//! let shard = |rank: usize, ranks: usize, data: Tensor| ShardRef {
//!     name: "w".into(),
//!     kind: StateKind::Param,
//!     global_shape: vec![4, 2],
//!     partition: None,
//!     pieces: vec![Piece {
//!         offset: vec![rank * 4 / ranks, 0],
//!         shape: vec![4 / ranks, 2],
//!         flat: 0..8 / ranks,
//!         local: 0,
//!     }],
//!     data: Elements::Tensor(data),
//! };
//! # let folder = tempfile::tempdir().unwrap();
//! # let dir = folder.path();
//! threads::run(2, |world| {
//!     let rank = world.rank();
//!     let rows = Tensor::arange(rank as f32 * 4.0, rank as f32 * 4.0 + 4.0, &Device::Cpu)?;
//!     save(dir, 100, &[shard(rank, 2, rows)], &serde_json::json!({"loss": 2.5}), &world)
//! })?;
//!
//! // One rank reads what two wrote.
//! let saved = latest(dir)?.unwrap();
//! assert_eq!(saved.iteration, 100);
//! let all = Tensor::zeros(8, DType::F32, &Device::Cpu)?;
//! load(&saved.path, &[shard(0, 1, all.clone())])?;
//! assert_eq!(all.to_vec1::<f32>()?, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
//! # Ok(())
//! # }
//! ```

#[cfg(target_endian = "big")]
compile_error!(
    "checkpoints are written as stored in memory, which must be little-endian, as in safetensors"
);

mod background;
mod block;
mod choice;
mod folder;
mod folder_lock;
mod foreign;
mod load;
mod manifest;
mod rank_file;
mod reshard;
mod retention;
mod save;
mod shard_file;
mod sidecar_files;
mod stream;
#[cfg(test)]
mod tests;
mod values;

pub use background::{Saving, begin};
pub use choice::{Later, last_save, later, to_load};
pub use folder::{
    Latest, checkpoints_folder, existing, holds_any, iteration_dir, iterations, latest, locate,
    resumable, same_folder,
};
pub use folder_lock::{FolderLock, lock_folder};
pub use foreign::Found;
pub use load::{load, verify};
pub use manifest::{Chunk, FORMAT_VERSION, Manifest, TensorEntry};
pub use reshard::reshard;
pub use retention::remove_old;
pub use save::save;
pub use shard_file::{SafetensorsWriter, ShardFile};
pub use sidecar_files::SidecarFiles;
pub use stream::StreamWriter;
pub use values::Float;
