//! Blind mutations of bytes, and of tokens that the parsers know.

/// Tokens that the parsers search for, and boundary values.
const WORDS: [&str; 88] = [
    "\"prompt\":",
    "\"messages\":",
    "\"stream\":true",
    "\"n\":",
    "\"stop\":",
    "\"max_tokens\":",
    "\"logprobs\":",
    "\"tools\":",
    "\"tool_choice\":",
    "\"role\":\"user\"",
    "\"content\":",
    "\"seed\":",
    "\"temperature\":",
    "\"logit_bias\":{\"1\":5}",
    "\"bad_words\":[\"a\"]",
    "\"allowed_token_ids\":[1]",
    "\"stop_token_ids\":[7]",
    "\"min_tokens\":",
    "\"stream_options\":{\"include_usage\":true}",
    "\"chat_template_kwargs\":{}",
    "\"response_format\":{\"type\":\"json_object\"}",
    "\"name\":",
    "\"arguments\":",
    "\"tokens\":",
    "\"x\":",
    "null",
    "true",
    "false",
    "0",
    "-1",
    "1",
    "1.5",
    "1e400",
    "-0.0",
    "9223372036854775808",
    "4294967296",
    "4096",
    "\"\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"é🎉\"",
    "[]",
    "{}",
    "[[1,2],[3]]",
    "{",
    "}",
    "[",
    "]",
    "\"",
    ",",
    ":",
    "\\",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<parameter=n>",
    "</parameter>",
    "<|im_end|>",
    "\u{2028}",
    "\n\n",
    "data: ",
    "\"pattern\":\"^a|b\"",
    "\"allOf\":[",
    "\"anyOf\":[{}]",
    "\"$ref\":\"#\"",
    "\"type\":\"string\"",
    "\"type\":\"object\"",
    "\"required\":[\"a\"]",
    "\"properties\":{",
    "\"enum\":[1]",
    "\"minLength\":3",
    "\"maxItems\":2",
    "\"input\":",
    "\"instructions\":",
    "\"system\":",
    "\"tool_use\"",
    "\"max_tokens\":5",
    "%json {}",
    "/.*a/",
    "start: ",
    "HTTP/1.1 200 OK\r\n",
    "Content-Length: ",
    "Location: /",
    "Content-Range: bytes 0-",
    "../",
];
/// Maximum length of an input in bytes.
const MAX_LENGTH: usize = 4096;

/// splitmix64 pseudo-random numbers.
pub struct Rng(pub u64);

impl Rng {
    /// A random number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

/// One of the seeds with a few changes.
pub fn mutate(seeds: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    let mut data = seeds[rng.below(seeds.len())].clone();
    for _ in 0..rng.below(6) {
        let at = rng.below(data.len() + 1);
        let end = (at + rng.below(16)).min(data.len());
        match rng.below(8) {
            0 => drop(data.drain(at..end)),
            1 => data.insert(at, rng.below(256) as u8),
            2 if at < data.len() => data[at] ^= 1 << rng.below(8),
            3 => drop(data.splice(at..end, WORDS[rng.below(WORDS.len())].bytes())),
            4 | 5 => drop(data.splice(at..at, WORDS[rng.below(WORDS.len())].bytes())),
            6 => {
                let other = &seeds[rng.below(seeds.len())];
                let from = rng.below(other.len() + 1);
                let to = (from + rng.below(64)).min(other.len());
                data.splice(at..at, other[from..to].iter().copied());
            }
            _ => {
                let copy = data[at..end].repeat(1 + rng.below(4));
                data.splice(at..at, copy);
            }
        }
    }
    data.truncate(MAX_LENGTH);
    data
}
