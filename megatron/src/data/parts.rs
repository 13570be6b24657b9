//! Documents in parts whose tokens, laid end to end, are those of the whole.

use std::collections::VecDeque;
use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use super::split_points::SplitPoints;
use super::text::Paragraphs;
use crate::Result;

/// Bytes behind the end of a paragraph within which it may be cut off, where it cannot be at its
/// end.
const NEAR: usize = 1 << 12;
/// Bytes of white space at its end within which it may.
const BLANK: usize = 64;

/// A part of a document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// Texts of a document's parts, laid end to end, are the document.
    pub text: String,
    /// The character before it, where its first tokens depend on there being one.
    pub(super) before: Option<char>,
    /// Where paragraphs end within it: its tokens are cut there.
    pub(super) ends: Vec<usize>,
    /// The document begins with it.
    pub first: bool,
    /// The document ends with it.
    pub last: bool,
}

impl Part {
    /// A whole document.
    pub fn whole(text: String) -> Self {
        Self { text, first: true, last: true, ..Self::default() }
    }
}

/// The parts of one document: its paragraphs, as nearly as it can be cut there, read as they are
/// asked for.
///
/// Where a document cannot be cut, it is one part, in memory as a whole.
pub struct Parts {
    paragraphs: Paragraphs,
    split_points: Arc<SplitPoints>,
    /// Read, but not yet given.
    held: String,
    /// Where paragraphs end in it.
    ends: VecDeque<usize>,
    all_read: bool,
    first: bool,
    before: Option<char>,
}

impl Parts {
    /// Of what `reader` gives; `path` is what errors name.
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
            // What was read before the error is no document.
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

    /// Where to cut what is held: at the end of a paragraph, else in the blank lines before it,
    /// else behind it.
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
