//! The fields of a protobuf message before it is decoded: those that this server does not know, and the memory that the
//! decoded message takes.

/// Fields of a message: they are numbered from 1, without gaps.
pub struct Fields {
    /// Number of the last field.
    pub last: u64,
    /// Fields that are messages: number, name, and number of their last field.
    pub messages: &'static [(u64, &'static str, u64)],
    /// Fields of text and token ids, which take little more memory than their bytes: number of the message, 0 for the
    /// outer one, and number of the field.
    pub compact: &'static [(u64, u64)],
}

impl Fields {
    /// A message of this many fields, of which none is a message.
    pub const fn flat(last: u64) -> Self {
        Self { last, messages: &[], compact: &[] }
    }

    /// The fields of `vllm.GenerateRequest`, version 0.6.0.
    pub const GENERATE: Self = Self {
        last: 18,
        messages: &[
            (6, "sampling", 5),
            (7, "decoding", 12),
            (8, "stopping", 7),
            (9, "response", 8),
            (10, "kv", 4),
            (17, "kv_hints", 3),
            (18, "engine_reasoning_gate", 2),
        ],
        compact: &[(0, 3), (0, 4), (7, 5), (7, 6), (7, 7), (7, 9), (7, 11)],
    };

    /// Names of the fields that this server does not know, such as `decoding.13`; at most `limit` of them.
    pub fn unknown(&self, message: &[u8], limit: usize) -> Vec<String> {
        let mut unknown = Vec::new();
        let mut add = |name: String| {
            if unknown.len() < limit && !unknown.contains(&name) {
                unknown.push(name);
            }
        };
        for (number, content) in records(message) {
            if number > self.last {
                add(number.to_string());
            }
            let Some((_, name, last)) = self.messages.iter().find(|(known, ..)| *known == number) else { continue };
            records(content).filter(|(inner, _)| inner > last).for_each(|(inner, _)| add(format!("{name}.{inner}")));
        }
        unknown
    }

    /// Upper bound of the decoded message's memory, in JSON values of the budget. A byte of an unknown structure may
    /// become a struct, a byte of text or of token ids becomes eight bytes at most.
    pub fn values(&self, message: &[u8]) -> usize {
        let value = |outer: u64, number: u64, content: &[u8]| {
            if self.compact.contains(&(outer, number)) { 1 + content.len() / 16 } else { 3 + content.len() }
        };
        let outer = records(message).map(|(number, content)| {
            let has_compact = self.compact.iter().any(|(outer, _)| *outer == number);
            let inner = records(content).map(|(inner, content)| value(number, inner, content));
            if has_compact { 3 + inner.sum::<usize>() } else { value(0, number, content) }
        });
        outer.sum()
    }
}

/// The records of a message: number of the field, and its bytes if it has a length. Ends at the first record that is
/// broken; decoding the message reports it.
fn records(mut message: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    std::iter::from_fn(move || {
        let tag = varint(&mut message)?;
        let content = match tag & 7 {
            0 => varint(&mut message).map(|_| &message[..0])?,
            1 => skip(&mut message, 8)?,
            2 => {
                let length = usize::try_from(varint(&mut message)?).ok()?;
                skip(&mut message, length)?
            }
            5 => skip(&mut message, 4)?,
            // A group, which no message of ours has: its fields count like those around it.
            3 | 4 => &[],
            _ => return None,
        };
        Some((tag >> 3, if tag & 7 == 2 { content } else { &[] }))
    })
}

fn skip<'a>(message: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (content, rest) = message.split_at_checked(length)?;
    *message = rest;
    Some(content)
}

/// A number of at most ten bytes, seven bits in each.
fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..70).step_by(7) {
        let (&byte, rest) = message.split_first()?;
        *message = rest;
        number |= u64::from(byte & 127).checked_shl(shift).unwrap_or(0);
        if byte < 128 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;
    use vllm_proto::generate_request::Prompt;
    use vllm_proto::{DecodingParameters, GenerateRequest, MediaItem, TokenIds};

    const FIELDS: Fields = Fields::GENERATE;

    #[test]
    fn a_group_hides_nothing() {
        let mut bytes = vec![0x9B, 0x01, 0x9C, 0x01];
        GenerateRequest { media: vec![MediaItem::default(); 100], ..Default::default() }.encode(&mut bytes).unwrap();
        GenerateRequest::decode(&*bytes).unwrap();
        assert!(FIELDS.values(&bytes) >= 300);
        assert_eq!(FIELDS.unknown(&bytes, 9), ["19"]);
    }

    #[test]
    fn fields_of_newer_versions_are_found() {
        let ids = Some(Prompt::TokenIds(TokenIds { ids: vec![1, 300] }));
        let decoding = Some(DecodingParameters { allowed_token_ids: vec![7; 40], ..Default::default() });
        let request =
            GenerateRequest { prompt: ids, decoding, priority: -1, temperature: Some(0.5), ..Default::default() };
        let mut bytes = request.encode_to_vec();
        assert!(FIELDS.unknown(&bytes, 9).is_empty());
        // Field 19 as a number, field 13 of decoding as text, field 20 as eight bytes; twice.
        for _ in 0..2 {
            bytes.extend([0x98, 0x01, 5, 0x3A, 3, 0x6A, 1, b'x', 0xA1, 0x01, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
        assert_eq!(FIELDS.unknown(&bytes, 9), ["19", "decoding.13", "20"]);
        assert_eq!(FIELDS.unknown(&bytes, 1), ["19"]);
        GenerateRequest::decode(&*bytes).unwrap();
        for end in 0..bytes.len() {
            FIELDS.unknown(&bytes[..end], 9);
            FIELDS.values(&bytes[..end]);
        }
    }

    #[test]
    fn the_bound_covers_what_is_decoded() {
        let text = GenerateRequest { prompt: Some(Prompt::Text("x".repeat(100_000))), ..Default::default() };
        let values = FIELDS.values(&text.encode_to_vec());
        assert!((6000..7000).contains(&values), "{values} for text");
        let ids = GenerateRequest {
            prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![1; 100_000] })),
            ..Default::default()
        };
        assert!(FIELDS.values(&ids.encode_to_vec()) * 128 > 100_000 * 4);
        let media = GenerateRequest { media: vec![MediaItem::default(); 1000], ..Default::default() };
        assert!(FIELDS.values(&media.encode_to_vec()) * 128 > 1000 * size_of::<MediaItem>());
        let decoding = DecodingParameters {
            bad_words_token_ids: vec![TokenIds::default(); 1000],
            allowed_token_ids: vec![1; 1000],
            ..Default::default()
        };
        let request = GenerateRequest { decoding: Some(decoding), ..Default::default() };
        assert!(FIELDS.values(&request.encode_to_vec()) * 128 > 1000 * (size_of::<TokenIds>() + 4));
    }
}
