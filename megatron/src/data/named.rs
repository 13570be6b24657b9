//! Tensors of a microbatch by name, for models with inputs other than tokens: features, classes,
//! targets.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};

use crate::{Error, Result};

/// Tensors of a microbatch by name, `[b, …]` each.
#[derive(Clone, Debug, Default)]
pub struct NamedTensors(BTreeMap<String, Tensor>);

impl NamedTensors {
    /// Stacks the tensors of a microbatch's samples, `[…]` each, on `device`.
    ///
    /// # Errors
    /// If samples differ in names, shapes or dtypes.
    pub fn stack(samples: &[Vec<(String, Tensor)>], device: &Device) -> Result<Self> {
        let Some(first) = samples.first() else { return Ok(Self::default()) };
        let mut all = BTreeMap::new();
        for (name, of_first) in first {
            let rows: Vec<&Tensor> = samples
                .iter()
                .map(|sample| {
                    let found = sample.iter().find(|(other, _)| other == name);
                    found.map(|(_, tensor)| tensor).ok_or_else(|| {
                        Error::config(format!("some samples of a batch have no tensor '{name}'"))
                    })
                })
                .collect::<Result<_>>()?;
            let other = rows
                .iter()
                .find(|row| row.dims() != of_first.dims() || row.dtype() != of_first.dtype());
            if let Some(other) = other {
                return Err(Error::config(format!(
                    "samples of a batch differ in '{name}': {:?} {:?} and {:?} {:?}",
                    of_first.dims(),
                    of_first.dtype(),
                    other.dims(),
                    other.dtype()
                )));
            }
            all.insert(name.clone(), Tensor::stack(&rows, 0)?.to_device(device)?);
        }
        Ok(Self(all))
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// If there is none; the error lists the existing names.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.0.get(name).ok_or_else(|| {
            let there: Vec<&str> = self.0.keys().map(String::as_str).collect();
            let there = match there.is_empty() {
                true => "it has none".to_string(),
                false => format!("it has {}", there.join(", ")),
            };
            Error::config(format!(
                "the microbatch has no tensor '{name}': {there}; SampleSource::named gives them"
            ))
        })
    }

    /// Whether there are none, as for text.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(features: &[f32]) -> Vec<(String, Tensor)> {
        vec![("features".into(), Tensor::new(features, &Device::Cpu).unwrap())]
    }

    #[test]
    fn tensors_of_samples_are_stacked_by_name() {
        let samples = [sample(&[1., 2.]), sample(&[3., 4.])];
        let named = NamedTensors::stack(&samples, &Device::Cpu).unwrap();
        let features = named.get("features").unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(features, [[1., 2.], [3., 4.]]);
        let message = named.get("labels").unwrap_err().to_string();
        assert!(message.contains("'labels'") && message.contains("features"), "{message}");
    }

    #[test]
    fn samples_that_differ_are_refused_by_name() {
        for other in [sample(&[3.]), Vec::new()] {
            let samples = [sample(&[1., 2.]), other];
            let message = NamedTensors::stack(&samples, &Device::Cpu).unwrap_err().to_string();
            assert!(message.contains("'features'"), "{message}");
        }
    }
}
