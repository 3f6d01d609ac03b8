//! Helpers of the unit tests.

use pegainfer_text::Tokenizer;

/// Tokenizer of the bundled checkpoint.
pub fn tokenizer() -> Tokenizer {
    Tokenizer::load(&pegainfer_testing::model_dir()).unwrap()
}
