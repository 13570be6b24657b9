//! Where the elements that a rank keeps of a buffer live: on its device, in the host's memory (Ren
//! et al. 2021, "ZeRO-Offload"), or in files (Rajbhandari et al. 2021, "ZeRO-Infinity").

use std::ops::Range;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use kernels::tensor::transfer::{Mark, fetch, mark, put, room};

use super::{Elements, FileBacked, copy_on_host};
use crate::{Error, Result};

/// Where a rank keeps elements between their uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Residence {
    /// Where it computes.
    #[default]
    Device,
    /// The host's memory, for a rank that computes on a GPU.
    Host,
    /// Files without a name in this folder.
    Files(PathBuf),
}

/// The elements that a rank keeps of one buffer.
#[derive(Clone, Debug)]
pub enum LocalPart {
    /// Where it computes.
    Device(Tensor),
    /// In the host's memory, while it computes on a GPU.
    Host(Tensor),
    /// In files.
    Files(FileBacked),
}

impl LocalPart {
    /// Zeros: as many as each of `parts` says, of its dtype. What is in files shares them.
    ///
    /// # Errors
    /// If there is no room. If they are to be in the host's memory and `device` is the host.
    pub fn zeros(
        what: &'static str,
        parts: &[(usize, DType)],
        residence: &Residence,
        device: &Device,
    ) -> Result<Vec<Self>> {
        let zeros = |&(len, dtype): &(usize, DType), device: &Device| -> Result<Tensor> {
            Ok(kernels::tensor::device::zeros(what, len, dtype, device)?)
        };
        match residence {
            Residence::Device => {
                parts.iter().map(|part| Ok(Self::Device(zeros(part, device)?))).collect()
            }
            Residence::Host if mark(device)?.is_none() => {
                let device = kernels::tensor::device::name(device);
                Err(Error::config(format!(
                    "{what} of this run are in the host's memory already, since it computes on {device}; leave the \
                     offload to the CPU out, or keep them in files (nvme)"
                )))
            }
            Residence::Host => {
                parts.iter().map(|part| Ok(Self::Host(zeros(part, &Device::Cpu)?))).collect()
            }
            Residence::Files(folder) => {
                Ok(FileBacked::zeros(folder, parts)?.into_iter().map(Self::Files).collect())
            }
        }
    }

    /// Their dtype.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Device(tensor) | Self::Host(tensor) => tensor.dtype(),
            Self::Files(files) => files.dtype(),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Device(tensor) | Self::Host(tensor) => tensor.elem_count(),
            Self::Files(files) => files.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them, if they are on the device.
    pub fn on_device(&self) -> Option<&Tensor> {
        match self {
            Self::Device(tensor) => Some(tensor),
            Self::Host(_) | Self::Files(_) => None,
        }
    }

    /// All of them, unless they are in files.
    pub fn in_memory(&self) -> Option<&Tensor> {
        match self {
            Self::Device(tensor) | Self::Host(tensor) => Some(tensor),
            Self::Files(_) => None,
        }
    }

    /// Bytes on the device.
    pub fn bytes_on_device(&self) -> usize {
        self.on_device().map_or(0, |tensor| tensor.elem_count() * tensor.dtype().size_in_bytes())
    }

    /// The elements `part` alone.
    ///
    /// # Errors
    /// If they are not among these.
    pub fn narrow(&self, part: &Range<usize>) -> Result<Self> {
        Ok(match self {
            Self::Device(tensor) => Self::Device(narrowed(tensor, part)?),
            Self::Host(tensor) => Self::Host(narrowed(tensor, part)?),
            Self::Files(files) => Self::Files(files.narrow(part)?),
        })
    }

    /// The elements `part` as a checkpoint reads and fills them.
    ///
    /// # Errors
    /// If they are not among these.
    pub fn elements(&self, part: &Range<usize>) -> Result<Elements> {
        Ok(match self {
            Self::Device(tensor) | Self::Host(tensor) => narrowed(tensor, part)?.into(),
            Self::Files(files) => files.narrow(part)?.into(),
        })
    }

    /// Has the system read what is in files, without waiting for it.
    pub fn prefetch(&self, part: Range<usize>) {
        if let Self::Files(files) = self {
            files.prefetch(part);
        }
    }

    /// The elements `part` on `device`: a view of those that are there, else a copy.
    ///
    /// # Errors
    /// If they cannot be read or copied.
    pub fn lend(&self, part: &Range<usize>, device: &Device) -> Result<Tensor> {
        if let Self::Device(tensor) = self {
            return narrowed(tensor, part);
        }
        let here = kernels::tensor::device::empty(part.len(), self.dtype(), device)?;
        self.copy_to(part, &here)?;
        Ok(here)
    }

    /// Copies the elements `part` to `to`, which may be on a GPU.
    ///
    /// # Errors
    /// If they cannot be read or copied.
    pub fn copy_to(&self, part: &Range<usize>, to: &Tensor) -> Result<()> {
        match (self, mark(to.device())?) {
            (Self::Device(tensor), _) => {
                Ok(kernels::ops::reduce::copy(to, &narrowed(tensor, part)?)?)
            }
            (_, None) => self.read(part, to),
            (_, Some(now)) => self.copy_to_gpu(part, to, &now),
        }
    }

    /// Copies the elements `part`, which are not on the device, to `to` on a GPU: after the mark
    /// `free`, and before work that is queued from now on.
    ///
    /// # Errors
    /// If they cannot be read or copied.
    pub fn copy_to_gpu(&self, part: &Range<usize>, to: &Tensor, free: &Mark) -> Result<()> {
        let staged = room(to, free)?;
        self.read(part, staged.tensor())?;
        Ok(put(staged, to, free)?)
    }

    /// Copies `from`, which may be on a GPU, to the elements `part`. A tensor that was lent, where
    /// it is a view, is already there.
    ///
    /// # Errors
    /// If they cannot be written or copied.
    pub fn give_back(&self, part: &Range<usize>, from: &Tensor) -> Result<()> {
        match (self, mark(from.device())?) {
            (Self::Device(_), _) => Ok(()),
            (_, None) => self.write(part, from),
            (_, Some(now)) => self.write_from_gpu(part, from, &now),
        }
    }

    /// As [`give_back`](Self::give_back), with what `from` holds on a GPU after `done`.
    ///
    /// # Errors
    /// As there.
    pub fn write_from_gpu(&self, part: &Range<usize>, from: &Tensor, done: &Mark) -> Result<()> {
        self.write(part, fetch(from, done)?.tensor())
    }

    /// The elements `part`, on the host: without a copy if they are there.
    ///
    /// # Errors
    /// If they cannot be read or copied.
    pub fn on_host(&self, part: &Range<usize>) -> Result<Tensor> {
        match self {
            Self::Device(tensor) if !tensor.device().is_cpu() => {
                // Transferring a view would transfer its whole storage; a contiguous copy has only
                // the needed elements.
                let part = narrowed(tensor, part)?.force_contiguous()?;
                Ok(part.to_device(&Device::Cpu)?)
            }
            Self::Device(tensor) | Self::Host(tensor) => narrowed(tensor, part),
            Self::Files(_) => self.lend(part, &Device::Cpu),
        }
    }

    /// As [`on_host`](Self::on_host), of all elements.
    ///
    /// # Errors
    /// As there.
    pub fn all_on_host(&self) -> Result<Tensor> {
        self.on_host(&(0..self.len()))
    }

    /// Puts the elements that [`on_host`](Self::on_host) gave back, from element `start` on.
    ///
    /// # Errors
    /// If they cannot be written or copied.
    pub fn put_back(&self, host: &Tensor, start: usize) -> Result<()> {
        match self {
            Self::Device(tensor) if !tensor.device().is_cpu() => {
                Ok(tensor.slice_set(&host.to_device(tensor.device())?, 0, start)?)
            }
            Self::Device(_) | Self::Host(_) => Ok(()),
            Self::Files(_) => self.write(&(start..start + host.elem_count()), host),
        }
    }

    /// Copies the elements `part` to `to`, on the host.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn read(&self, part: &Range<usize>, to: &Tensor) -> Result<()> {
        match self {
            Self::Device(tensor) | Self::Host(tensor) => copy_on_host(&narrowed(tensor, part)?, to),
            Self::Files(files) => files.narrow(part)?.read(to),
        }
    }

    /// Copies `from`, on the host, to the elements `part`.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn write(&self, part: &Range<usize>, from: &Tensor) -> Result<()> {
        match self {
            Self::Device(tensor) | Self::Host(tensor) => {
                copy_on_host(from, &narrowed(tensor, part)?)
            }
            Self::Files(files) => files.narrow(part)?.write(from),
        }
    }
}

impl From<Tensor> for LocalPart {
    fn from(tensor: Tensor) -> Self {
        Self::Device(tensor)
    }
}

fn narrowed(tensor: &Tensor, part: &Range<usize>) -> Result<Tensor> {
    Ok(tensor.narrow(0, part.start, part.len())?)
}
