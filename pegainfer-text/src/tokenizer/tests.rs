//! Ids against Hugging Face's tokenizers, texts against the reference, and refusals.

use super::*;
use pegainfer_testing::gguf::{Value, Writer};
use pegainfer_testing::{self as testing, Rng};

#[test]
fn no_text_is_longer_than_measured() {
    let tokenizer = Tokenizer::load(&testing::model_dir()).unwrap();
    let mut rng = Rng(testing::seed());
    for _ in 0..2000 {
        let ids: Vec<u32> = (0..1 + rng.below(8)).map(|_| rng.below(4096) as u32).collect();
        let (max_bytes, text) = (tokenizer.max_text_bytes(&ids), tokenizer.decode_all(&ids));
        assert!(
            (text.len()..=3 * text.len() + 3).contains(&max_bytes),
            "{ids:?}: {max_bytes} for {} bytes",
            text.len()
        );
    }
}

/// Hugging Face's tokenizer of the same checkpoint.
fn oracle(dir: &Path) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_file(dir.join("tokenizer.json")).unwrap()
}

/// Random texts of words, spaces, digits, controls, every script, combining marks and special tokens; a few are
/// long.
fn compare_with_oracle(dir: &Path, cases: usize) {
    compare(&Tokenizer::load(dir).unwrap(), &oracle(dir), cases);
}

fn compare(tokenizer: &Tokenizer, oracle: &tokenizers::Tokenizer, cases: usize) {
    let added = oracle.get_added_tokens_decoder();
    let mut specials: Vec<&str> = added.values().map(|token| token.content.as_str()).collect();
    specials.sort_unstable();
    let words =
        ["the", " The", "don't", "I'LL", "  ", "\n\n", "\r\n ", "\t", "1234567", " 3.14", "!?", "…", "e\u{301}"];
    let seed = testing::seed();
    let mut rng = Rng(seed);
    for case in 0..cases {
        let parts = if case % 100 == 0 { 4000 } else { rng.below(40) };
        let mut text = String::new();
        for _ in 0..parts {
            match rng.below(8) {
                0 => text += specials[rng.below(specials.len())],
                1 => text.extend(char::from_u32(rng.below(0x11_0000) as u32)),
                2 => text.extend(char::from_u32(rng.below(0x3000) as u32)),
                3 => text.push(char::from(rng.below(128) as u8)),
                _ => text += words[rng.below(words.len())],
            }
        }
        for add_special_tokens in [false, true] {
            let expected = oracle.encode_fast(text.as_str(), add_special_tokens).unwrap();
            let ids = tokenizer.encode(&text, add_special_tokens).unwrap();
            assert!(ids == expected.get_ids(), "seed {seed}, case {case}: {text:?}");
        }
    }
}

#[test]
fn random_texts_encode_as_the_reference_encodes_them() {
    compare_with_oracle(&testing::model_dir(), 2000);
}

#[test]
fn a_vocabulary_in_gguf_encodes_as_the_same_one_in_a_folder() {
    let (dir, gguf) = (testing::model_dir(), testing::model_dir().with_file_name("qwen3-tiny-256-gguf"));
    let (tokenizer, folder) = (Tokenizer::load(&gguf).unwrap(), Tokenizer::load(&dir).unwrap());
    compare(&tokenizer, &oracle(&dir), 1000);
    assert_eq!(tokenizer.id_limit, folder.id_limit);
    for id in 0..folder.id_limit as u32 {
        let of = |tokenizer: &Tokenizer| (tokenizer.token_bytes(id), tokenizer.is_special(id));
        assert_eq!(of(&tokenizer), of(&folder), "{id}");
    }
}

/// The 256 bytes as a byte-level vocabulary spells them, in the order of the bytes.
fn alphabet() -> Vec<String> {
    let mut spelled = vec![String::new(); 256];
    for (character, byte) in byte_alphabet().into_iter().enumerate() {
        if let Some(byte) = byte {
            spelled[byte as usize] = char::from_u32(character as u32).unwrap().to_string();
        }
    }
    spelled
}

/// SmolLM2's vocabularies are in this order.
#[test]
fn control_tokens_come_first_in_some_gguf_vocabularies() {
    let dir = testing::TempDir::new("control-tokens-first");
    let path = dir.path().join("tokenizer.gguf");
    let words = |words: &[&str]| words.iter().map(ToString::to_string).collect::<Vec<_>>();
    let tokens = [words(&["<|end|>", "<|start|>"]), alphabet(), words(&["<unused>", "he", "<tag>"])].concat();
    let types = [vec![3, 3], vec![1; 256], vec![5, 1, 4]].concat();
    let mut writer = Writer::default();
    writer.pair("general.architecture", "qwen3").pair("qwen3.block_count", 1u32);
    writer.pair("tokenizer.ggml.model", "gpt2").pair("tokenizer.ggml.pre", "smollm");
    writer.pair("tokenizer.ggml.tokens", Value::Texts(tokens));
    writer.pair("tokenizer.ggml.token_type", Value::Integers(types));
    writer.pair("tokenizer.ggml.merges", Value::Texts(words(&["h e"])));
    std::fs::write(&path, writer.bytes()).unwrap();

    let tokenizer = Tokenizer::load(&path).unwrap();
    let byte = |byte: u8| 2 + u32::from(byte);
    let expected = [1, 259, byte(b' '), byte(b'1'), byte(b'2'), 260, byte(b'h'), 0];
    assert_eq!(tokenizer.encode("<|start|>he 12<tag>h<|end|>", true).unwrap(), expected);
    assert_eq!(tokenizer.decode(&expected), "he 12<tag>h");
    assert!([0, 1].into_iter().all(|id| tokenizer.is_special(id)) && !tokenizer.is_special(260));
    let json = ModelFiles::open(&path).unwrap().read("tokenizer.json").unwrap().unwrap();
    compare(&tokenizer, &tokenizers::Tokenizer::from_bytes(json).unwrap(), 500);
}

#[test]
#[ignore = "needs other checkpoints: PEGAINFER_TEST_TOKENIZERS=DIR:DIR"]
fn random_texts_encode_as_the_reference_encodes_them_in_other_vocabularies() {
    let dirs = std::env::var_os("PEGAINFER_TEST_TOKENIZERS").expect("PEGAINFER_TEST_TOKENIZERS is not set");
    for dir in std::env::split_paths(&dirs) {
        compare_with_oracle(&dir, 20_000);
    }
}

#[test]
fn the_fixture_prompts_encode_to_the_reference_ids() {
    let tokenizer = Tokenizer::load(&testing::model_dir()).unwrap();
    for case in testing::fixture_cases() {
        let prompt = case["prompt"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(prompt, false).unwrap(), ids, "{}", case["name"]);
    }
}

#[test]
fn the_fixture_outputs_decode_to_the_reference_text() {
    let (tokenizer, oracle) = (Tokenizer::load(&testing::model_dir()).unwrap(), oracle(&testing::model_dir()));
    for case in testing::fixture_cases() {
        let ids: Vec<u32> = serde_json::from_value(case["greedy_ids"].clone()).unwrap();
        let expected = oracle.decode(&ids, true).unwrap();
        assert_eq!(tokenizer.decode(&ids), expected, "{}", case["name"]);
    }
}

#[test]
fn every_token_stands_for_the_bytes_the_reference_decoder_gives_it() {
    let (tokenizer, oracle) = (Tokenizer::load(&testing::model_dir()).unwrap(), oracle(&testing::model_dir()));
    for id in 0..tokenizer.id_limit as u32 + 10 {
        let reference = oracle.decode(&[id], false).unwrap();
        assert_eq!(tokenizer.token_text(id), reference, "token {id}");
    }
}

#[test]
fn no_text_has_fewer_tokens_than_its_bytes_say() {
    let tokenizer = Tokenizer::load(&testing::model_dir()).unwrap();
    let longest = (0..4096).max_by_key(|id| tokenizer.token_bytes(*id).len()).unwrap();
    let text = tokenizer.token_text(longest).repeat(100);
    let tokens = tokenizer.encode(&text, false).unwrap().len();
    let fewest = tokenizer.min_tokens(text.len());
    assert!(fewest <= tokens && fewest >= 100 / MAX_COMPOSITION, "{fewest} of {tokens}");
    assert_eq!(tokenizer.min_tokens(0), 0);
}

#[test]
fn a_missing_or_broken_file_is_one_clear_sentence() {
    let dir = testing::TempDir::new("tokenizer");
    let error = Tokenizer::load(dir.path()).err().unwrap().to_string();
    assert!(error.ends_with("is missing: the checkpoint needs a Hugging Face tokenizer.json"), "{error}");
    std::fs::write(dir.path().join("tokenizer.json"), "{\"version\":").unwrap();
    let error = Tokenizer::load(dir.path()).err().unwrap().to_string();
    assert!(error.contains("is not a valid tokenizer"), "{error}");
}

#[test]
fn a_tokenizer_that_is_larger_than_the_model_is_refused() {
    let tokenizer = Tokenizer::load(&testing::model_dir()).unwrap();
    assert!(tokenizer.check_vocab(4096).is_ok());
    let error = tokenizer.check_vocab(4000).unwrap_err().to_string();
    assert_eq!(
        error,
        "the tokenizer has 4096 tokens, but the model's vocabulary has only 4000: they do not belong together"
    );
}
