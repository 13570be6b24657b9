//! Writes a checkpoint from one process, tensor by tensor; peak memory is that of the largest
//! tensor.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::folder::{Names, refuse_checkpoint};
use super::folder_lock::{FolderLock, lock_folder_alone};
use super::manifest::{Chunk, FORMAT_VERSION, MANIFEST, Manifest, TensorEntry};
use super::rank_file::CHUNK_ELEMENTS;
use super::shard_file::{SafetensorsWriter, write_synced};
use super::values::Float;
use crate::params::StateKind;
use crate::{Error, Result};

const FILE: &str = "rank_00000.safetensors";

/// A checkpoint that is being written. If dropped before [`StreamWriter::finish`], it leaves
/// nothing behind.
pub struct StreamWriter {
    _lock: FolderLock,
    names: Names,
    iteration: u64,
    tensors: Vec<TensorEntry>,
    /// Tensors written so far.
    written: usize,
    out: Option<SafetensorsWriter>,
}

impl StreamWriter {
    /// Starts the checkpoint of `iteration` in `dir`, with `tensors` (name, kind, unpadded shape,
    /// dtype). No run may save there until it is finished or dropped.
    ///
    /// # Errors
    /// If `dir` holds a checkpoint, a run saves there, or it cannot be written to.
    pub fn create(
        dir: &Path,
        iteration: u64,
        tensors: impl IntoIterator<Item = (String, StateKind, Vec<usize>, Float)>,
    ) -> Result<Self> {
        let names = Names::new(dir, iteration);
        let entry = |(name, kind, shape, dtype)| TensorEntry {
            name,
            kind,
            shape,
            partition: None,
            dtype,
            chunks: Vec::new(),
        };
        let tensors: Vec<TensorEntry> = tensors.into_iter().map(entry).collect();
        let lock = lock_folder_alone(dir)?;
        refuse_checkpoint(dir)?;
        names.prepare()?;
        let mut writer = Self { _lock: lock, names, iteration, tensors, written: 0, out: None };
        let keys: Vec<String> = writer.tensors.iter().map(key).collect();
        let stored = keys
            .iter()
            .zip(&writer.tensors)
            .map(|(key, t)| (key.as_str(), t.dtype, t.shape.as_slice()));
        writer.out = Some(SafetensorsWriter::create(&writer.names.temp.join(FILE), stored)?);
        Ok(writer)
    }

    /// Writes the next tensor: its elements in row-major order, little-endian.
    ///
    /// # Errors
    /// If a file operation fails, or the number of bytes is not the tensor's.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let (Some(tensor), Some(out)) = (self.tensors.get_mut(self.written), &mut self.out) else {
            return Err(Error::checkpoint(
                &self.names.target,
                "internal error: one tensor too many was written",
            ));
        };
        let numel: usize = tensor.shape.iter().product();
        if bytes.len() != numel * tensor.dtype.size() {
            let message = format!(
                "internal error: {} bytes are not {} {:?}",
                bytes.len(),
                tensor.dtype,
                tensor.shape
            );
            return Err(Error::checkpoint(&self.names.target, message));
        }
        for (i, part) in bytes.chunks(CHUNK_ELEMENTS * tensor.dtype.size()).enumerate() {
            let start = i * CHUNK_ELEMENTS;
            tensor.chunks.push(Chunk {
                file: FILE.into(),
                key: key(tensor),
                start,
                offset: vec![0; tensor.shape.len()],
                shape: tensor.shape.clone(),
                flat: start..start + part.len() / tensor.dtype.size(),
                crc32c: crc32c::crc32c(part),
            });
            out.write(part)?;
        }
        self.written += 1;
        Ok(())
    }

    /// Makes the checkpoint appear, with the trainer's `state`, and updates the pointer; returns
    /// the checkpoint's folder.
    ///
    /// # Errors
    /// If a file operation fails or a tensor is missing. Existing checkpoints are then unchanged.
    pub fn finish(mut self, state: &serde_json::Value) -> Result<PathBuf> {
        let refuse = |message: String| Error::checkpoint(&self.names.target, message);
        let out = self
            .out
            .take()
            .ok_or_else(|| refuse("internal error: it was finished twice".into()))?;
        let files = BTreeMap::from([(FILE.to_string(), out.finish()?)]);
        let mut tensors = std::mem::take(&mut self.tensors);
        tensors.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
        let (iteration, folder) = (self.iteration, self.names.target.clone());
        let manifest = Manifest {
            format_version: FORMAT_VERSION,
            iteration,
            state: state.clone(),
            files,
            tensors,
            folder,
        };
        manifest.validate().map_err(|why| refuse(format!("internal error: {why}")))?;
        let bytes = manifest.to_bytes().map_err(|e| refuse(e.to_string()))?;
        write_synced(&self.names.temp.join(MANIFEST), &bytes)?;
        self.names.commit()?;
        Ok(self.names.target.clone())
    }
}

impl Drop for StreamWriter {
    fn drop(&mut self) {
        // After `finish` there is no temporary folder left.
        self.names.discard();
    }
}

fn key(tensor: &TensorEntry) -> String {
    format!("{}/{}/0", tensor.kind, tensor.name)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use serde_json::json;

    use super::*;
    use crate::checkpoint::latest;
    use crate::params::{Piece, ShardRef};

    #[test]
    fn a_streamed_checkpoint_is_found_and_loads() {
        let dir = tempfile::tempdir().unwrap();
        let tensors = [("a", vec![2, 3], Float::F32), ("b", vec![4], Float::Bf16)];
        let entries = tensors
            .clone()
            .map(|(name, shape, dtype)| (name.to_string(), StateKind::Param, shape, dtype));
        let mut writer = StreamWriter::create(dir.path(), 7, entries).unwrap();
        let a: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
        writer.write(&a).unwrap();
        writer.write(&[0; 8]).unwrap();
        let path = writer.finish(&json!({"model": 1})).unwrap();
        assert_eq!(latest(dir.path()).unwrap().unwrap().path, path);
        let data = Tensor::zeros(6, DType::F32, &Device::Cpu).unwrap();
        let piece = Piece { offset: vec![0, 0], shape: vec![2, 3], flat: 0..6, local: 0 };
        let shard = ShardRef {
            name: "a".into(),
            kind: StateKind::Param,
            global_shape: vec![2, 3],
            partition: None,
            pieces: vec![piece],
            data: data.clone().into(),
        };
        crate::checkpoint::load(&path, &[shard]).unwrap();
        assert_eq!(data.to_vec1::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        crate::checkpoint::verify(&path).unwrap();
    }

    #[test]
    fn an_unfinished_checkpoint_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let entries = [("a".to_string(), StateKind::Param, vec![2], Float::F32)];
        let mut writer = StreamWriter::create(dir.path(), 0, entries.clone()).unwrap();
        assert!(writer.write(&[0; 4]).is_err());
        assert!(writer.finish(&json!({})).is_err());
        drop(StreamWriter::create(dir.path(), 0, entries).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
