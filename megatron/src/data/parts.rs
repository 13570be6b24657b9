//! Splits documents into parts so that the concatenated tokens of the parts equal those of the
//! whole.

use std::collections::VecDeque;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use super::split_points::SplitPoints;
use super::text::Paragraphs;
use crate::Result;

/// If a paragraph cannot be cut at its end, it may be cut within this many bytes after it.
const NEAR: usize = 1 << 12;
/// Or within this many bytes of white space at its end.
const BLANK: usize = 64;

/// A part of a document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The concatenated texts of a document's parts are the document.
    pub text: String,
    /// The character before it, if its first tokens depend on that.
    pub(super) before: Option<char>,
    /// Positions in the text where paragraphs end; its tokens are split there.
    pub(super) ends: Vec<usize>,
    /// It starts the document.
    pub first: bool,
    /// It ends the document.
    pub last: bool,
}

impl Part {
    /// A whole document.
    pub fn whole(text: String) -> Self {
        Self { text, first: true, last: true, ..Self::default() }
    }
}

/// The parts of one document: its paragraphs, as closely as it can be cut there, read on demand.
///
/// A document that cannot be cut is one part, held in memory as a whole.
pub struct Parts {
    paragraphs: Paragraphs,
    split_points: Arc<SplitPoints>,
    /// Text that was read but not yet returned.
    held: String,
    /// Positions where paragraphs end in `held`.
    ends: VecDeque<usize>,
    all_read: bool,
    first: bool,
    before: Option<char>,
}

impl Parts {
    /// The parts of the text from `reader`; errors name `path`.
    pub fn new(
        path: &Path,
        reader: Box<dyn BufRead + Send>,
        split_points: Arc<SplitPoints>,
    ) -> Self {
        Self::of(Paragraphs::new(path, reader), split_points)
    }

    pub(super) fn of(paragraphs: Paragraphs, split_points: Arc<SplitPoints>) -> Self {
        Self {
            paragraphs,
            split_points,
            held: String::new(),
            ends: VecDeque::new(),
            all_read: false,
            first: true,
            before: None,
        }
    }

    /// The next part; `None` at the end.
    ///
    /// # Errors
    /// If the text cannot be read or is not UTF-8.
    pub fn read(&mut self) -> Result<Option<Part>> {
        if self.split_points.never() {
            while !self.all_read {
                self.read_paragraph()?;
            }
            let ends = std::mem::take(&mut self.ends).into();
            return Ok(self.take(self.held.len(), true).map(|part| Part { ends, ..part }));
        }
        loop {
            while !self.all_read
                && self
                    .ends
                    .front()
                    .is_none_or(|end| self.held.len() < end + self.split_points.ahead())
            {
                self.read_paragraph()?;
            }
            let Some(end) = self.ends.pop_front() else {
                return Ok(self.take(self.held.len(), true));
            };
            if let Some(at) = self.near(end) {
                return Ok(self.take(at, false));
            }
        }
    }

    fn read_paragraph(&mut self) -> Result<()> {
        let read = self.paragraphs.read().inspect_err(|_| {
            // The text read before the error is not a document.
            self.held.clear();
            self.ends.clear();
            self.all_read = true;
        });
        match read? {
            Some(paragraph) => {
                self.held.push_str(&paragraph.text);
                self.all_read = paragraph.last;
                if !paragraph.last {
                    self.ends.push_back(self.held.len());
                }
            }
            None => self.all_read = true,
        }
        Ok(())
    }

    /// Where to cut the held text: at the end of a paragraph, else in the blank lines before that
    /// end, else after it.
    fn near(&self, end: usize) -> Option<usize> {
        let text = &self.held;
        let blank = text[..end].trim_end().len().max(end.saturating_sub(BLANK)).max(1);
        let limit = self.ends.front().copied().unwrap_or(text.len()).min(end.saturating_add(NEAR));
        let places = (blank..=end).rev().chain(end + 1..limit);
        places
            .filter(|&at| text.is_char_boundary(at))
            .find(|&at| self.split_points.allow(text, at, self.all_read))
    }

    fn take(&mut self, at: usize, last: bool) -> Option<Part> {
        if at == 0 {
            return None;
        }
        let rest = self.held.split_off(at);
        let text = std::mem::replace(&mut self.held, rest);
        self.ends.retain_mut(|end| {
            let is_behind = *end > at;
            *end = end.saturating_sub(at);
            is_behind
        });
        let first = std::mem::take(&mut self.first);
        let before = self.before.filter(|_| self.split_points.overlap());
        self.before = text.chars().next_back();
        Some(Part { text, before, ends: Vec::new(), first, last })
    }
}
