//! The data of a run.

use std::sync::Arc;

use crate::data::{DocumentEnds, SampleSource};

/// The data of a run.
#[derive(Clone)]
pub struct Sources {
    /// Training data.
    pub train: Arc<dyn SampleSource>,
    /// Data for evaluation during the run, if any.
    pub valid: Option<Arc<dyn SampleSource>>,
    /// Data for evaluation at the run's end, if any.
    pub test: Option<Arc<dyn SampleSource>>,
    /// The tokens that end documents, if documents are treated separately.
    pub document_ends: Option<DocumentEnds>,
    /// Equal for equal tokens. A resumed run reports if it reads other data.
    pub fingerprint: String,
}

impl Sources {
    /// A source of training samples, without data for evaluation.
    pub fn of(train: impl SampleSource + 'static) -> Self {
        Self {
            train: Arc::new(train),
            valid: None,
            test: None,
            document_ends: None,
            fingerprint: String::new(),
        }
    }
}
