//! Headers: what is read, and one clear sentence for each kind of damage.

use super::*;
use crate::{ModelFiles, read};
use pegainfer_testing::gguf::{Value, Writer};
use pegainfer_testing::{Rng, TempDir, seed};

/// A model of one Q4_0 matrix `[2, 64]` and one f32 vector.
fn writer() -> Writer {
    let mut writer = Writer::default();
    writer.pair("general.architecture", "qwen3").pair("qwen3.block_count", 1u32);
    writer.pair("list", Value::Texts(vec!["a".into(), String::new(), "ccc".into()]));
    writer.pair("types", Value::Integers(vec![1, 0, 7])).pair("negative", Value::Integers(vec![1, -1]));
    writer.pair("flag", Value::Flag(true)).pair("epsilon", 1e-6f32);
    writer.tensor("token_embd.weight", &[2, 64], 2, vec![1; 2 * 2 * 18]);
    writer.tensor("blk.0.attn_norm.weight", &[3], 0, vec![2; 12]);
    writer
}

fn parse(bytes: &[u8]) -> Result<Header, String> {
    Header::read(bytes, bytes.len() as u64).map_err(|error| error.to_string())
}

/// The file with the first occurrence of `from` replaced.
fn changed(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|window| window == from).expect("it is there");
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}

#[test]
fn fields_and_tensors_are_read() {
    let bytes = writer().bytes();
    let Header { metadata, tensors } = parse(&bytes).unwrap();
    assert_eq!(metadata.text("general.architecture").unwrap().as_deref(), Some("qwen3"));
    assert_eq!(metadata.unsigned("qwen3.block_count").unwrap(), Some(1));
    assert_eq!(metadata.texts("list").unwrap().unwrap(), ["a", "", "ccc"]);
    assert_eq!(metadata.integers("types").unwrap().unwrap(), [1, 0, 7]);
    assert_eq!((metadata.flag("flag").unwrap(), metadata.number("epsilon").unwrap()), (Some(true), Some(1e-6)));
    assert_eq!((metadata.number("none").unwrap(), metadata.len()), (None, 7));
    assert!(metadata.integers("negative").unwrap_err().contains("negative is an array, and must be"));
    assert!(metadata.unsigned("flag").unwrap_err().contains("flag is a boolean"));
    let [matrix, vector] = tensors.as_slice() else { panic!("{tensors:?}") };
    assert_eq!((matrix.shape.as_slice(), matrix.kind, matrix.bytes), (&[2, 64][..], TensorType::Q4_0, 72));
    assert_eq!((vector.shape.as_slice(), vector.start, vector.bytes), (&[3][..], matrix.start + 96, 12));
    assert_eq!(bytes[vector.start as usize..][..12], [2; 12]);
}

#[test]
fn each_damage_is_one_clear_sentence() {
    let bytes = writer().bytes();
    let name = b"token_embd.weight";
    let table = [name.as_slice(), &2u32.to_le_bytes(), &64u64.to_le_bytes(), &2u64.to_le_bytes()].concat();
    let kind = |id: u32| [table.as_slice(), &id.to_le_bytes()].concat();
    let sizes =
        |dims: u32, a: u64, b: u64| [name.as_slice(), &dims.to_le_bytes(), &a.to_le_bytes(), &b.to_le_bytes()].concat();
    let at = |offset: u64| [kind(2).as_slice(), &offset.to_le_bytes()].concat();
    let aligned = |alignment: u32| writer().pair("general.alignment", alignment).bytes();
    for (damaged, message) in [
        (changed(&bytes, b"GGUF", b"GGML"), "does not begin with GGUF"),
        (changed(&bytes, &[3, 0, 0, 0], &[1, 0, 0, 0]), "version 1, and version 3"),
        (changed(&bytes, &[3, 0, 0, 0], &[0, 0, 0, 3]), "big-endian"),
        (changed(&bytes, &2u64.to_le_bytes(), &u64::MAX.to_le_bytes()), "announces 18446744073709551615 tensors"),
        (changed(&bytes, &7u64.to_le_bytes(), &u64::MAX.to_le_bytes()), "18446744073709551615 metadata pairs"),
        (changed(&bytes, &20u64.to_le_bytes(), &u64::MAX.to_le_bytes()), "a metadata key has 18446744073709551615"),
        (changed(&bytes, &5u64.to_le_bytes(), &(1u64 << 62).to_le_bytes()), "its header asks for"),
        (changed(&bytes, b"qwen3.block_count", b"qwen3.block_coun\xff"), "key is not valid UTF-8"),
        (
            changed(&bytes, b"qwen3.block_count\x04", b"qwen3.block_count\x0d"),
            "qwen3.block_count has the unknown type 13",
        ),
        (changed(&bytes, b"list\x09\0\0\0\x08", b"list\x09\0\0\0\x09"), "list is an array of arrays"),
        (
            changed(
                &bytes,
                b"types\x09\0\0\0\x05\0\0\0\x03\0\0\0\0\0\0\0",
                b"types\x09\0\0\0\x0b\0\0\0\0\0\0\0\0\0\0\x20",
            ),
            "types has 2305843009213693952 elements",
        ),
        (writer().pair("flag", 1u32).bytes(), "the metadata key flag twice"),
        (writer().tensor("token_embd.weight", &[1], 0, vec![0; 4]).bytes(), "tensor token_embd.weight is there twice"),
        (writer().tensor(&"x".repeat(64), &[1], 0, vec![0; 4]).bytes(), "has 64 bytes, and may have 1 to 63"),
        (changed(&bytes, &kind(2), &kind(99)), "token_embd.weight has the unknown type 99"),
        (changed(&bytes, &kind(2), &kind(12)), "rows of 64 elements, and Q4_K stores 256"),
        (changed(&bytes, &table, &sizes(2, 1 << 40, 1 << 40)), "impossible sizes"),
        (changed(&bytes, &table, &sizes(2, 0, 2)), "impossible sizes"),
        (changed(&bytes, &table, &sizes(2, 64, 1 << 40)), "and the file has"),
        (changed(&bytes, &table, &sizes(5, 64, 2)), "has 5 dimensions"),
        (changed(&bytes, &at(0), &at(1)), "impossible offset 1"),
        (bytes[..bytes.len() - 32].to_vec(), "tensor blk.0.attn_norm.weight has 12 bytes at byte"),
        (aligned(24), "general.alignment is 24, and must be a power of two"),
        (aligned(0), "general.alignment is 0"),
    ] {
        let error = parse(&damaged).unwrap_err();
        assert!(error.contains(message) && !error.contains('\n'), "{error}: not {message}");
    }
    for length in 0..parse(&bytes).unwrap().tensors[0].start as usize {
        assert!(parse(&bytes[..length]).is_err(), "{length}");
    }
}

#[test]
fn random_changes_never_panic() {
    let (bytes, mut rng) = (writer().bytes(), Rng(seed()));
    for _ in 0..5000 {
        let mut damaged = bytes.clone();
        for _ in 0..1 + rng.below(4) {
            let at = rng.below(damaged.len());
            damaged[at] = [0, 1, 3, 0x7f, 0xff, rng.below(256) as u8][rng.below(6)];
        }
        if let Ok(header) = parse(&damaged) {
            let end = damaged.len() as u64;
            assert!(header.tensors.iter().all(|tensor| tensor.start + tensor.bytes <= end));
        }
    }
}

#[test]
fn shards_are_one_model() {
    let dir = TempDir::new("gguf-shards");
    let path = |i: usize| dir.path().join(format!("m-{i:05}-of-00002.gguf"));
    let shard = |number: u32, count: u32, tensor: &str| {
        let mut shard = Writer::default();
        shard.pair("general.architecture", "qwen3").pair("split.no", number).pair("split.count", count);
        shard.pair("split.tensors.count", 2u32).tensor(tensor, &[8], 0, vec![0; 32]);
        shard.bytes()
    };
    std::fs::write(path(1), shard(0, 2, "a")).unwrap();
    assert!(Gguf::open(&path(1)).unwrap_err().to_string().contains("m-00002-of-00002.gguf"), "one is missing");
    std::fs::write(path(2), shard(1, 2, "b")).unwrap();
    for i in [1, 2] {
        let model = Gguf::open(&path(i)).unwrap();
        let places: Vec<_> = model.tensors.iter().map(|tensor| (tensor.file, tensor.info.name.as_str())).collect();
        assert_eq!((places, model.files), (vec![(0, "a"), (1, "b")], vec![path(1), path(2)]));
    }
    let refused = |bytes: Vec<u8>, message: &str| {
        std::fs::write(path(2), bytes).unwrap();
        let error = Gguf::open(&path(1)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    };
    refused(shard(0, 2, "b"), "says shard 1 of 2, and its name another one");
    refused(shard(1, 3, "b"), "says shard 2 of 3");
    refused(shard(1, 2, "a"), "another shard also has the tensor a");
    let alone = dir.path().join("alone.gguf");
    std::fs::write(&alone, shard(1, 2, "b")).unwrap();
    let error = Gguf::open(&alone).unwrap_err().to_string();
    assert!(error.contains("it is shard 2 of 2, and its name must end in -00002-of-00002.gguf"), "{error}");
}

#[test]
fn a_folder_with_one_model_is_that_model() {
    let dir = TempDir::new("gguf-folder");
    let write = |name: &str| std::fs::write(dir.path().join(name), writer().bytes()).unwrap();
    let kind = || match ModelFiles::open(dir.path()) {
        Ok(ModelFiles::Folder(_)) => "folder".to_owned(),
        Ok(ModelFiles::Gguf(gguf)) => gguf.files[0].file_name().unwrap().to_str().unwrap().to_owned(),
        Err(error) => error.to_string(),
    };
    assert_eq!(kind(), "folder");
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    for other in ["mmproj-BF16.gguf", "mtp-x.gguf", "imatrix_unsloth.gguf", "m-00002-of-00002.gguf"] {
        write(other);
    }
    assert_eq!((kind().as_str(), read(dir.path(), "config.json").unwrap().as_deref()), ("folder", Some("{}")));
    write("x-Q4_0.gguf");
    assert_eq!(kind(), "x-Q4_0.gguf");
    write("x-Q8_0.gguf");
    assert!(
        kind().ends_with("holds several GGUF models: give the path of one, for example x-Q4_0.gguf or x-Q8_0.gguf")
    );
    std::fs::write(dir.path().join("model.safetensors"), "").unwrap();
    assert_eq!(kind(), "folder");
}

#[test]
fn what_is_not_served_is_refused_from_the_header() {
    let dir = TempDir::new("gguf-refused");
    let path = dir.path().join("m.gguf");
    let open = |writer: &Writer| {
        std::fs::write(&path, writer.bytes()).unwrap();
        ModelFiles::open(&path).map(|_| ()).map_err(|error| error.to_string())
    };
    let matrix = |name: &str| writer().tensor(name, &[1, 256], 10, vec![0; 84]).clone();
    let error = open(&matrix("blk.0.ffn_down.weight")).unwrap_err();
    assert!(error.contains("blk.0.ffn_down.weight has type Q2_K, and weights in F32, F16, BF16, Q8_0,"), "{error}");
    open(&matrix("v.blk.0.ffn_down.weight")).expect("the image encoder is not loaded");
    let error = open(Writer::default().pair("general.architecture", "gemma3")).unwrap_err();
    assert!(
        error.contains("its architecture is gemma3, and qwen3, qwen3moe, qwen35 and qwen35moe are served"),
        "{error}"
    );
    assert!(open(&Writer::default()).unwrap_err().contains("no general.architecture"));
}

#[test]
fn a_model_has_the_name_of_its_file_without_the_number_of_a_shard() {
    for (file, name) in [
        ("Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M"),
        ("Qwen3-32B-BF16-00001-of-00003.gguf", "Qwen3-32B-BF16"),
        ("Qwen3-32B-BF16-00004-of-00003.gguf", "Qwen3-32B-BF16-00004-of-00003"),
        ("Qwen3-32B", "Qwen3-32B"),
    ] {
        assert_eq!(model_name(file), name);
    }
}
