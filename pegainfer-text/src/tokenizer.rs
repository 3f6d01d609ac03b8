//! Converts text to token ids, and token ids to bytes.

mod files;
mod growth;

use fastokens::decoders::Decoder;
use fastokens::normalizers::Normalizer;
use pegainfer_model_files::{FilesError, ModelFiles};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a checkpoint's tokenizer cannot be used, or a text cannot be encoded.
#[derive(Debug, Error)]
pub enum TokenizerError {
    /// tokenizer.json does not exist.
    #[error("{path} is missing: the checkpoint needs a Hugging Face tokenizer.json")]
    Missing {
        /// Expected path.
        path: PathBuf,
    },
    /// The files of a model in GGUF.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// tokenizer.json cannot be parsed.
    #[error("{path} is not a valid tokenizer: {reason}")]
    Malformed {
        /// Path of tokenizer.json.
        path: PathBuf,
        /// Error of the parser.
        reason: String,
    },
    /// The decoder is not byte-level BPE, which all families served here use.
    #[error("{path} does not use a ByteLevel decoder, and only byte-level tokenizers are supported")]
    NotByteLevel {
        /// Path of tokenizer.json.
        path: PathBuf,
    },
    /// The tokenizer can produce ids that the model has no embedding for.
    #[error(
        "the tokenizer has {tokenizer} tokens, but the model's vocabulary has only {model}: they do not belong together"
    )]
    LargerThanModel {
        /// Number of tokens of the tokenizer.
        tokenizer: usize,
        /// Number of rows of the model's embedding table.
        model: usize,
    },
    /// The text could not be encoded.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
}

/// Maximum number of bytes that NFC composes into one: three jamo of three bytes each become a syllable of three.
const MAX_COMPOSITION: usize = 3;

/// A byte-level BPE tokenizer.
///
/// `fastokens` encodes: same ids as Hugging Face's `tokenizers` (tested), in a fiftieth of the time. Decoding is
/// implemented here. In a byte-level vocabulary each token stands for fixed bytes, so a text is the concatenation of
/// its tokens' bytes. This makes incremental decoding exact and linear in the length of the output.
pub struct Tokenizer {
    inner: fastokens::Tokenizer,
    /// Added tokens that are left out of the text (`"special": true`).
    special: HashSet<u32>,
    /// `byte_of[c]` for each character of the byte-level alphabet (all are below U+0144).
    byte_of: [Option<u8>; 0x144],
    /// One more than the highest id.
    id_limit: usize,
    /// Maximum number of text bytes per token; `None` if there is no bound.
    max_token_bytes: Option<usize>,
}

impl Tokenizer {
    /// Loads the tokenizer of the model at `path`: `tokenizer.json` of a folder, or the vocabulary in a GGUF file.
    pub fn load(path: &Path) -> Result<Self, TokenizerError> {
        let (files, name) = (ModelFiles::open(path)?, "tokenizer.json");
        let path = files.path(name);
        let Some(text) = files.read(name)? else { return Err(TokenizerError::Missing { path }) };
        files::check(&files, &text).map_err(|(path, reason)| TokenizerError::Malformed { path, reason })?;
        let malformed = |reason: String| TokenizerError::Malformed { path: path.clone(), reason };
        let inner = match &files {
            // Also reads the tokens that only tokenizer_config.json declares.
            ModelFiles::Folder(_) => fastokens::Tokenizer::from_file(&path),
            ModelFiles::Gguf(_) => {
                let json = serde_json::from_str(&text).map_err(|e| malformed(e.to_string()))?;
                fastokens::Tokenizer::from_json(json)
            }
        };
        let mut inner = inner.map_err(|e| malformed(e.to_string()))?;
        if !matches!(inner.decoder(), Some(Decoder::ByteLevel(_))) {
            return Err(TokenizerError::NotByteLevel { path });
        }
        // Some checkpoints keep the truncation of their training; a prompt must never be cut silently.
        inner.set_padding(None);
        inner.set_truncation(None);
        let added = inner.added_token_configs();
        let special = added.iter().filter(|token| token.special).map(|token| token.id).collect();
        let highest_added = added.iter().map(|token| token.id as usize + 1).max().unwrap_or(0);
        let id_limit = highest_added.max(inner.model().vocab_size());
        let mut this = Self { inner, special, byte_of: byte_alphabet(), id_limit, max_token_bytes: None };
        this.max_token_bytes = this.longest_token();
        Ok(this)
    }

    /// Maximum number of text bytes per token: the longest token, times three if NFC composes characters first. `None`
    /// with tokens that absorb surrounding spaces, or with other normalizers, which have no bound.
    fn longest_token(&self) -> Option<usize> {
        if self.inner.added_token_configs().iter().any(|token| token.lstrip || token.rstrip) {
            return None;
        }
        let longest = (0..self.id_limit as u32).map(|id| self.token_bytes(id).len()).max()?;
        match self.inner.normalizer() {
            None => Some(longest),
            Some(Normalizer::Nfc(_)) => Some(MAX_COMPOSITION * longest),
            Some(_) => None,
        }
    }

    /// Lower bound of the tokens of `bytes` bytes of text. The real number is far higher.
    pub fn min_tokens(&self, bytes: usize) -> usize {
        self.max_token_bytes.map_or(0, |longest| bytes / longest.max(1))
    }

    /// Refuses a tokenizer with ids outside the model's embedding table. (Larger tables are common: they are padded.)
    pub fn check_vocab(&self, vocab_size: usize) -> Result<(), TokenizerError> {
        if self.id_limit > vocab_size {
            return Err(TokenizerError::LargerThanModel { tokenizer: self.id_limit, model: vocab_size });
        }
        Ok(())
    }

    /// Token ids of `text`. Special tokens written out in the text become their ids. `add_special_tokens` also runs the
    /// tokenizer's post-processor (a leading BOS, if the checkpoint has one).
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        self.inner
            .encode_with_special_tokens(text, add_special_tokens)
            .map_err(|e| TokenizerError::Encode(e.to_string()))
    }

    /// Texts of the tokens outside the vocabulary: control tokens, and tags such as `<tool_call>`. They become tokens
    /// wherever a text spells them out.
    pub fn added_tokens(&self) -> impl Iterator<Item = &str> {
        self.inner.added_token_configs().iter().map(|token| token.content.as_str())
    }

    /// True if the token is a control token, which is left out of the generated text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The bytes of a token, including special tokens; empty for ids without a token (padding).
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.inner.id_to_token(id) else { return Vec::new() };
        let bytes: Option<Vec<u8>> = token.chars().map(|c| self.byte_of.get(c as usize).copied().flatten()).collect();
        // Added tokens may contain characters outside the byte-level alphabet, such as a space; they are taken
        // literally.
        bytes.unwrap_or_else(|| token.as_bytes().to_vec())
    }

    /// Text of a token for log-probabilities. Bytes that are not valid UTF-8 alone become U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(&self.token_bytes(id)).into_owned()
    }

    /// A token as spelled in tokenizer.json, for example with `Ġ` for a space; `None` for ids without a token.
    pub fn vocabulary_text(&self, id: u32) -> Option<&str> {
        self.inner.id_to_token(id)
    }

    /// Upper bound of the text bytes of these tokens, without building the text. The vocabulary spells a byte with one
    /// or two bytes. A byte that is not valid UTF-8 is spelled with two, and takes three in the text.
    pub fn max_text_bytes(&self, ids: &[u32]) -> usize {
        let spelled: usize = ids.iter().map(|&id| self.vocabulary_text(id).map_or(0, str::len)).sum();
        spelled + spelled / 2
    }

    /// Text of token ids, including special tokens.
    pub fn decode_all(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Text of token ids, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> =
            ids.iter().filter(|&&id| !self.is_special(id)).flat_map(|&id| self.token_bytes(id)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Inverse of GPT-2's byte-to-character table: printable Latin-1 stands for itself, and the other 68 bytes map to the
/// characters from U+0100 on, in order.
fn byte_alphabet() -> [Option<u8>; 0x144] {
    let mut byte_of = [None; 0x144];
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        if printable {
            byte_of[byte as usize] = Some(byte);
        } else {
            byte_of[next] = Some(byte);
            next += 1;
        }
    }
    byte_of
}

#[cfg(test)]
mod tests;
