//! Texts on the encoder's threads.

use super::*;
use crate::testing;

const ONE: Tenant = Tenant { id: 1, has_key: false };

#[tokio::test]
async fn texts_are_encoded_in_their_order() {
    let (encoder, workers) = (Encoder::start(Arc::new(testing::tokenizer())).unwrap(), Workers::default());
    let texts: Vec<String> = (0..50).map(|i| format!("text number {i}")).collect();
    let expected: Vec<_> = texts.iter().map(|text| encoder.tokenizer.encode(text, true).unwrap()).collect();
    assert_eq!(encoder.share_thread(&workers, ONE, encode(texts, true)).await.unwrap().unwrap(), expected);
}

#[tokio::test]
async fn a_panic_ends_no_thread() {
    let (encoder, workers) = (Encoder::start(Arc::new(testing::tokenizer())).unwrap(), Workers::default());
    for _ in 0..2 * MAX_THREADS {
        let result = encoder.share_thread(&workers, ONE, |_, _| panic!("a bug")).await;
        assert!(matches!(result, Err::<(), _>(EncoderError::Panicked)));
    }
    assert_eq!(encoder.run(|_| 5), 5);
}
