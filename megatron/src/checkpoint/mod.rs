//! Checkpoints: one logical state on disk, written under one layout and read under any other.
//!
//! ```text
//! DIR/latest_checkpointed_iteration.txt    the iteration to resume from
//! DIR/iter_0000100/manifest.json           logical tensors, and the chunks that make them up
//! DIR/iter_0000100/rank_00003.safetensors  what rank 3 owned and wrote
//! ```
//!
//! The manifest lists every logical tensor (name, kind, unpadded shape, dtype) with its chunks:
//! each names a file, a tensor in it, and which elements of which box of the logical tensor lie
//! there, with a CRC-32C of their bytes. Nothing in it says tp, pp or dp: loading intersects what a
//! rank wants with what the chunks hold ([`load`]). The manifest also carries the trainer's own
//! state as JSON that this module does not look into.
//!
//! A checkpoint appears whole or not at all ([`save`]): everything is written to
//! `DIR/.iter_0000100.tmp`, synced, and renamed; the pointer moves last. It may be written while
//! training goes on ([`begin`]). Files are untrusted when read: a damaged one gives an error that
//! names it. One run at a time may save into a folder ([`lock_folder`]), and older checkpoints may
//! go when a newer one is there ([`remove_old`]).

#[cfg(target_endian = "big")]
compile_error!(
    "checkpoints are written as they lie in memory, which must be little-endian as safetensors is"
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
