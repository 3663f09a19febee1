//! The code as it is on disk: these vectors never change.
//!
//! They were made with another implementation, klauspost/reedsolomon 1.14 for Go, given its own Cauchy matrix of 16 data
//! shards (`1 / ((16 + i) + j)`) scaled to ones in the first row and the first column by its own products.

use holdfast_erasure::{Code, Kernel, SHARDS_MAX};

/// Row `i` holds the coefficients of parity shard `i`, one byte per data shard.
const PARITY_MATRIX: [&str; 15] = [
    "010101010101010101010101010101",
    "01820a15803753586e4051162773d2",
    "010a37da27f749515491b5b4e17cd9",
    "0115dab4a57ed07fc143dbf4af8d78",
    "018027a5d9e1a1635cf33cc4acc75a",
    "0137f77ee15a68b5d52e1750a8edac",
    "015349d0a168ef3adcb984ac0f6c18",
    "0158517f63b53a6c6ab08af63c181d",
    "016e54c15cd5dc6a46ede6087b9af8",
    "01409143f32eb9b0edc503f21b4d4f",
    "0151b5db3c17848ae6037036deeb33",
    "0116b4f4c450acf608f236f3b9874b",
    "0127e1afaca80f3c7b1bdeb99e0d46",
    "01737c8dc7ed6c189a4deb870d1d61",
    "01d2d9785aac181df84f334b4661a8",
];

/// Shards of 16 bytes, data first.
struct Golden {
    data_shards: u8,
    parity_shards: u8,
    shards: &'static [&'static str],
}

const GOLDEN: [Golden; 6] = [
    Golden {
        data_shards: 2,
        parity_shards: 1,
        shards: &[
            "3f456ae3604b91df4b7ac556d94b8ae5",
            "c3d03ce8541d849de2d8c2ec2d81bb24",
            "fc95560b34561542a9a207baf4ca31c1",
        ],
    },
    Golden {
        data_shards: 4,
        parity_shards: 2,
        shards: &[
            "4243021c5ef8ca1b155fbeef16b41346",
            "d050172c22b0a2fac26c8a3de7e01f42",
            "f3663786246c463c92cd878cf11b4b66",
            "f4e3d4e83a095cc01ebd3410ddb91eb5",
            "9596f65e622d721d5b43874eddf659d7",
            "4b89cadbea914ed4434e1122c0e67947",
        ],
    },
    Golden {
        data_shards: 7,
        parity_shards: 1,
        shards: &[
            "478731d9b11c0d2afe12111fff70ce2e",
            "03071fd99e2422594730b54af7e3be8d",
            "39e6e4e5670e801fff9dd4b55310f445",
            "f487de5199c69e127b468f6346fb1902",
            "26a866b7a0ee0514227b6de385edca7b",
            "fd6ca17e13fa1ed7bafa25df9f856d06",
            "2f724e7506370079bc0473aa43c4ff27",
            "7d579d0864d32ac4197cc41544d4c5be",
        ],
    },
    Golden {
        data_shards: 8,
        parity_shards: 8,
        shards: &[
            "499df0b3064ff63cb16580df77550fe7",
            "8961fd3f83168dfffa5a7def9716411e",
            "61d8081e1af62a7dd813b282370b1556",
            "cdac4b18c2c0da87ae42963927d41695",
            "9dcb1dfd6a5c8aec3cc886e83999f986",
            "843e85f60aa09cc9ae8656e34dd12dca",
            "2af0c9d5b01c72d6ab2cdf4d67196c48",
            "3c89fa6794ec01ba6907926fb7ff4a7b",
            "6304e5331963ee706d0b44a25432bf45",
            "a2c847ec58b23ba5146ef1623b4f6f48",
            "3e8edc6c8a3186273b488626f493eb65",
            "35d7c510c53d6127558bbe55733396b3",
            "408845d95ec06847f8b8b85145bf3f74",
            "c565a432300f0e1fd5adcf46b817acc9",
            "ceb8c40596ca2d112204fc54a82af52f",
            "e5dd24010c1f2d8f5db0e54c0907c167",
        ],
    },
    Golden {
        data_shards: 1,
        parity_shards: 3,
        shards: &[
            "3e00d45f0cd4880c2cac6abf2cf8585e",
            "3e00d45f0cd4880c2cac6abf2cf8585e",
            "3e00d45f0cd4880c2cac6abf2cf8585e",
            "3e00d45f0cd4880c2cac6abf2cf8585e",
        ],
    },
    Golden {
        data_shards: 12,
        parity_shards: 4,
        shards: &[
            "4f0e05ec022cd33437d7baf51470c2de",
            "b94ae874fadbc44d05dc73f52f20836d",
            "2e3ae07b7f481248cb7346e773fde7da",
            "adebd5afc9a66a339721ebeff95a0fe7",
            "174ab7bfd39c06d460b46fdf23e97234",
            "3efb12b26c193dfc1515c087b18b6e94",
            "f2229b34492517d4ad1a3e02ce21d55c",
            "153ac1e511aed72f37534c09235b81b0",
            "a9dc3eac705892d9eddbdf44e586e3d7",
            "e099a7032851b7e63d2b0f96e3629188",
            "2bc4fa4b1c1ca605e0e3a4719becd73d",
            "4e412e1966653dcee7a1ab2247304880",
            "97fc6a6d8b672a25560366da14d70c20",
            "041548afd020d61a2c0f1a83d640bfa4",
            "c8a67edeb3c036700b9621320e073127",
            "e6d85e129c53cd584e135aecdef85e25",
        ],
    },
];

/// Copies of the vectors laid side by side, so that every kernel works on whole blocks and on a remainder.
const COPIES: usize = 67;

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("two hexadecimal digits");
    (0..hex.len()).step_by(2).map(digits).collect()
}

fn available_kernels() -> impl Iterator<Item = Kernel> {
    Kernel::ALL.into_iter().filter(|kernel| kernel.is_available())
}

fn encode(kernel: Kernel, code: Code, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
    let mut parity = vec![vec![0xEE; data[0].len()]; usize::from(code.parity_shards())];
    let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
    code.encode_with(kernel, &data, &mut outputs);
    parity
}

#[test]
fn unit_shards_encode_to_the_parity_matrix() {
    for data_shards in 1..SHARDS_MAX {
        let code = Code::new(data_shards as u8, (SHARDS_MAX - data_shards) as u8).expect("a valid geometry");
        let identity: Vec<Vec<u8>> =
            (0..data_shards).map(|i| (0..data_shards).map(|j| u8::from(i == j)).collect()).collect();
        for (parity, row) in encode(Kernel::Portable, code, &identity).iter().zip(PARITY_MATRIX) {
            assert_eq!(parity[..], bytes_of(row)[..data_shards], "{code:?}");
        }
    }
}

#[test]
fn every_kernel_encodes_the_golden_vectors() {
    for Golden { data_shards, parity_shards, shards } in GOLDEN {
        let code = Code::new(data_shards, parity_shards).expect("a valid geometry");
        let shards: Vec<Vec<u8>> = shards.iter().map(|hex| bytes_of(hex).repeat(COPIES)).collect();
        let (data, parity) = shards.split_at(usize::from(data_shards));
        for kernel in available_kernels() {
            assert!(encode(kernel, code, data) == parity, "{kernel}: {code:?}");
        }
    }
}

#[test]
fn every_kernel_rebuilds_the_golden_vectors() {
    for Golden { data_shards, parity_shards, shards } in GOLDEN {
        let code = Code::new(data_shards, parity_shards).expect("a valid geometry");
        let shards: Vec<Vec<u8>> = shards.iter().map(|hex| bytes_of(hex).repeat(COPIES)).collect();
        // The last shards survive, so as many data shards as possible are lost.
        let survivors: Vec<(u8, &[u8])> =
            (parity_shards..code.shards()).map(|index| (index, shards[usize::from(index)].as_slice())).collect();
        for kernel in available_kernels() {
            for want in 0..code.shards() {
                let mut out = vec![0xEE; shards[0].len()];
                code.reconstruct_with(kernel, &survivors, want, &mut out).expect("enough sources");
                assert!(out == shards[usize::from(want)], "{kernel}: shard {want} of {code:?}");
            }
        }
    }
}
