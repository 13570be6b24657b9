//! The data that a run reads.

use std::sync::Arc;

use crate::data::{DocumentEnds, SampleSource};

/// The data of a run.
#[derive(Clone)]
pub struct Sources {
    /// What steps are made with.
    pub train: Arc<dyn SampleSource>,
    /// What is evaluated during the run, if anything is.
    pub valid: Option<Arc<dyn SampleSource>>,
    /// What is evaluated at the run's end, if anything is.
    pub test: Option<Arc<dyn SampleSource>>,
    /// What ends documents, if that changes anything.
    pub document_ends: Option<DocumentEnds>,
    /// Equal for equal tokens; a resumed run tells if it reads other data.
    pub fingerprint: String,
}

impl Sources {
    /// Samples to train with, and nothing to evaluate.
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
