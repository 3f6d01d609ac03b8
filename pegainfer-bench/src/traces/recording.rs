//! Recordings of this program (`serve --record`), with ids, hashes or lengths.

use super::format::{Format, JsonFields};
use super::reader::{Read, Reader, seconds};
use super::request::TraceRequest;
use crate::recording::format::{Added, Ended, RecordLine, VERSION};
use crate::recording::keys;
use serde::Deserialize;
use std::collections::HashMap;
use std::time::Duration;

pub(super) const FORMAT: Format = Format {
    name: "recording of pegainfer serve --record",
    columns: "JSON Lines with a header {\"record\":2,..}, add and end",
    time: "t, seconds",
};
/// Tokens per hashed block.
const BLOCK_TOKENS: usize = 16;

#[derive(Default)]
struct Recording {
    /// Requests that have not ended.
    added: HashMap<u64, TraceRequest>,
    /// For the last block of an ended request's prompt and output: its session, and the time of the end. A prompt that
    /// begins with that block and everything before it continues the session.
    ends: HashMap<u64, (u64, Duration)>,
}

/// The reader of a file that begins with this line.
pub(super) fn reader(fields: &JsonFields, first: &str) -> Option<Box<dyn Reader>> {
    #[derive(Deserialize)]
    struct Version {
        record: u32,
    }
    let version: Version = fields.has("record").then(|| serde_json::from_str(first).ok())??;
    (1..=VERSION).contains(&version.record).then(|| Box::new(Recording::default()) as Box<dyn Reader>)
}

impl Reader for Recording {
    fn format(&self) -> &'static Format {
        &FORMAT
    }

    fn read(&mut self, line: &str) -> Result<Read, String> {
        match line.parse().map_err(|error: serde_json::Error| error.to_string())? {
            RecordLine::Added(added) => self.add(*added).map(|()| Read::Nothing),
            RecordLine::Ended(ended) => self.end(ended),
            RecordLine::Gap { gap } => Ok(Read::Skipped(gap as usize)),
            RecordLine::Schedule(_) => Ok(Read::Nothing),
        }
    }

    fn open(&self) -> usize {
        self.added.len()
    }
}

impl Recording {
    fn add(&mut self, added: Added) -> Result<(), String> {
        let at = seconds(added.t)?;
        let first = added.choice_of.map(|id| {
            let missing =
                || format!("the prompt of request {} is in the line of request {id}, which is missing", added.add);
            self.added.get(&id).ok_or_else(missing)
        });
        let (ids, blocks) = match first.transpose()? {
            Some(first) => (first.ids.clone(), first.session.map(|_| first.blocks.clone())),
            None => {
                let images = added.images_of(added.ids.as_deref().unwrap_or_default());
                let images = images.map_err(|error| error.to_string())?;
                let hashes = added.hashes.as_deref().map(hashes).transpose()?;
                (added.ids.map(|ids| keys(&images, &ids)), hashes)
            }
        };
        let before = blocks.iter().flatten().rev().find_map(|hash| self.ends.get(hash));
        let request = TraceRequest {
            at,
            prompt_len: added.prompt_tokens,
            session: before.map(|(session, _)| *session).or(blocks.as_ref().map(|_| added.add)),
            delay: before.map(|(_, end)| at.saturating_sub(*end)),
            blocks: blocks.unwrap_or_default(),
            block_tokens: BLOCK_TOKENS,
            ids,
            ..TraceRequest::default()
        };
        self.added.insert(added.add, request);
        Ok(())
    }

    /// The request, with its recorded number of tokens.
    fn end(&mut self, ended: Ended) -> Result<Read, String> {
        let Some(mut request) = self.added.remove(&ended.end) else { return Ok(Read::Nothing) };
        request.output_len = ended.tokens;
        let last = ended.hashes.as_deref().map(hashes).transpose()?.and_then(|blocks| blocks.last().copied());
        if let (Some(last), Some(session)) = (last, request.session) {
            self.ends.insert(last, (session, seconds(ended.t)?));
        }
        Ok(Read::Request(request))
    }
}

fn hashes(texts: &[String]) -> Result<Vec<u64>, String> {
    let hash = |text: &String| u64::from_str_radix(text, 16).map_err(|_| format!("{text:?} is not a hash"));
    texts.iter().map(hash).collect()
}
