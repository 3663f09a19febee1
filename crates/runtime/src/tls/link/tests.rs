use super::super::sealed_bytes_max;
use super::*;
use crate::pki::{Authority, Pair};
use holdfast_base::NodeId;
use rcgen::{CertificateParams, KeyPair};
use std::fs;
use std::io::IoSlice;

const GRID: GridId = GridId(7);

/// A grid's directory of certificates, in a test.
struct Certificates {
    dir: tempfile::TempDir,
    authority: Authority,
}

impl Certificates {
    fn new(grid: GridId) -> Certificates {
        let (authority, kept) = Authority::make(grid).unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("ca.pem"), kept.certificate).unwrap();
        Certificates { dir, authority }
    }

    fn put(&self, name: &str, pair: &Pair) -> LinkPaths {
        let path = |what: &str| self.dir.path().join(format!("{name}{what}"));
        fs::write(path(".pem"), &pair.certificate).unwrap();
        fs::write(path(".key"), &pair.key).unwrap();
        LinkPaths { ca: self.dir.path().join("ca.pem"), certificate: path(".pem"), key: path(".key") }
    }

    fn paths(&self, role: &Role) -> LinkPaths {
        self.put(&role.to_string(), &self.authority.issue(role).unwrap())
    }

    fn node(&self, number: u32) -> ServerTls {
        ServerTls::load(&self.paths(&Role::Node(NodeId(number))), GRID, Role::Node(NodeId(number))).unwrap()
    }

    fn host(&self, name: &str) -> HostTls {
        HostTls::load(&self.paths(&Role::Host(name.into())), GRID, name).unwrap()
    }
}

/// Passes everything between the two until neither has more; an error says whose it is.
fn exchange(host: &mut TlsStream, node: &mut TlsStream) -> (Result<Vec<u8>, String>, Result<Vec<u8>, String>) {
    let (mut at_host, mut at_node) = (Ok(Vec::new()), Ok(Vec::new()));
    let step = |from: &mut TlsStream, to: &mut TlsStream, came: &mut Result<Vec<u8>, String>| {
        let mut bytes = Vec::new();
        from.take_ciphertext(&mut bytes);
        let is_quiet = bytes.is_empty();
        if let Ok(plaintext) = came {
            for piece in bytes.chunks_mut(1000) {
                if let Err(error) = to.on_ciphertext(piece, plaintext) {
                    *came = Err(error.to_string());
                    break;
                }
            }
        }
        is_quiet
    };
    loop {
        let up = step(host, node, &mut at_node);
        let down = step(node, host, &mut at_host);
        if up && down {
            return (at_host, at_node);
        }
    }
}

/// A session on any configuration of a client.
fn stranger(configure: impl FnOnce(&mut ClientConfig), pair: Option<&Pair>) -> TlsStream {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(rustls::ALL_VERSIONS)
        .unwrap()
        .with_root_certificates(RootCertStore::empty());
    let mut config = match pair {
        None => builder.with_no_client_auth(),
        Some(pair) => {
            let certificate = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
            let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
            builder.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    config.dangerous().set_certificate_verifier(Arc::new(Anybody));
    configure(&mut config);
    let name = ServerName::try_from("holdfast").unwrap();
    TlsStream::over(UnbufferedClientConnection::new(Arc::new(config), name).unwrap().into(), true)
}

/// A client that does not mind whom it meets.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

#[test]
fn a_host_and_its_node_know_each_other_and_talk() {
    let certificates = Certificates::new(GRID);
    let (mut host, mut node) =
        (certificates.host("a").connect(Role::Node(NodeId(3))).unwrap(), certificates.node(3).accept().unwrap());
    assert_eq!((host.peer(), node.peer()), (None, None));
    // Said before anybody is known: it waits.
    host.send_parts(&[IoSlice::new(b"hel"), IoSlice::new(b""), IoSlice::new(b"lo")]);
    let (at_host, at_node) = exchange(&mut host, &mut node);
    assert_eq!((at_host, at_node), (Ok(Vec::new()), Ok(b"hello".to_vec())));
    assert_eq!(node.peer().unwrap().role, Role::Host("a".into()));
    assert_eq!(host.peer().unwrap(), Identity { grid: GRID, role: Role::Node(NodeId(3)) });
    let payload: Vec<u8> = (0..300_000_u32).map(|n| (n * 7) as u8).collect();
    let (head, tail) = payload.split_at(100);
    host.send_parts(&[IoSlice::new(head), IoSlice::new(tail)]);
    node.send_parts(&[IoSlice::new(&payload)]);
    let (at_host, at_node) = exchange(&mut host, &mut node);
    assert!(at_host.unwrap() == payload && at_node.unwrap() == payload);
}

/// A host and a node that know each other.
fn a_pair() -> (TlsStream, TlsStream) {
    let certificates = Certificates::new(GRID);
    let mut host = certificates.host("a").connect(Role::Node(NodeId(3))).unwrap();
    let mut node = certificates.node(3).accept().unwrap();
    assert_eq!(exchange(&mut host, &mut node), (Ok(Vec::new()), Ok(Vec::new())));
    (host, node)
}

/// Seals parts as links do.
fn sealed(from: &mut TlsStream, parts: &[&[u8]]) -> Vec<u8> {
    let len = parts.iter().map(|part| part.len()).sum();
    let mut out = vec![0; sealed_bytes_max(len)];
    let count = from.seal(parts.iter().copied(), &mut out);
    out.truncate(count);
    out
}

#[test]
fn messages_of_all_sizes_go_both_ways_wherever_they_are_cut() {
    let (mut host, mut node) = a_pair();
    let bytes: Vec<u8> = (0..200_000_u32).map(|n| (n * 31 / 7) as u8).collect();
    let record = 16 * 1024;
    let lens = [1, 150, 0, 8192, record - 150, record, record + 1, 70_000, 3, 2 * record, 150_000];
    for piece in [1, 4, 5, 6, 22, 1000, record + 21, record + 22, record + 23, 65_536, 1_000_000] {
        for is_up in [true, false] {
            let (from, to) = if is_up { (&mut host, &mut node) } else { (&mut node, &mut host) };
            let (mut wire, mut said) = (Vec::new(), Vec::new());
            for (n, len) in lens.iter().enumerate() {
                let (head, tail) = bytes[n..][..*len].split_at(len / 3 * (n % 3));
                wire.append(&mut sealed(from, &[head, tail]));
                said.extend_from_slice(&bytes[n..][..*len]);
            }
            let mut heard = Vec::new();
            for part in wire.chunks_mut(piece) {
                to.on_ciphertext(part, &mut heard).unwrap();
            }
            assert!(heard == said, "in pieces of {piece} bytes");
            let mut own = Vec::new();
            to.take_ciphertext(&mut own);
            assert!(own.is_empty(), "nothing is said that was not asked for");
        }
    }
}

#[test]
fn parts_share_records_that_are_as_full_as_can_be() {
    let (mut host, _) = a_pair();
    let (record, extra) = (16 * 1024, 5 + 1 + 16);
    let bytes = vec![7; 100_000];
    for lens in [&[150][..], &[150, 8192], &[100, 0, 40_000, 9], &[record, record], &[1, record - 1, 5], &[99_999]] {
        let parts: Vec<&[u8]> = lens.iter().map(|len| &bytes[..*len]).collect();
        let len: usize = lens.iter().sum();
        assert_eq!(sealed(&mut host, &parts).len(), len + len.div_ceil(record) * extra, "{lens:?}");
    }
    assert!(sealed(&mut host, &[b"", b""]).is_empty());
}

#[test]
fn what_came_before_damage_is_heard_and_nothing_after_it() {
    let (mut host, mut node) = a_pair();
    let mut wire = sealed(&mut host, &[b"sound"]);
    let damaged_at = wire.len() + 8;
    wire.append(&mut sealed(&mut host, &[b"damaged"]));
    wire.append(&mut sealed(&mut host, &[b"unheard"]));
    wire[damaged_at] ^= 1;
    let mut heard = Vec::new();
    assert!(node.on_ciphertext(&mut wire, &mut heard).is_err());
    assert_eq!(heard, b"sound");
    // It is for good, the host is told, and nothing else is said to it.
    assert!(node.on_ciphertext(&mut sealed(&mut host, &[b"more"]), &mut heard).is_err());
    assert!(sealed(&mut node, &[b"an answer"]).is_empty());
    node.close();
    let mut alert = Vec::new();
    node.take_ciphertext(&mut alert);
    let error = host.on_ciphertext(&mut alert, &mut heard).unwrap_err().to_string();
    assert!(error.contains("the other side ended"), "{error}");
    assert_eq!(heard, b"sound");
}

#[test]
fn the_cheaper_cipher_is_agreed_on_and_others_are_there_for_other_releases() {
    let (host, node) = a_pair();
    for end in [host, node] {
        let suite = end.session.state().negotiated_cipher_suite().map(|suite| suite.suite());
        assert_eq!(suite, Some(CipherSuite::TLS13_AES_128_GCM_SHA256));
    }
    let offered: Vec<_> = provider().cipher_suites.iter().map(|suite| suite.suite()).collect();
    assert!(offered.contains(&CipherSuite::TLS13_AES_256_GCM_SHA384), "{offered:?}");
}

#[test]
fn a_node_lets_in_hosts_and_nodes_of_its_grid_and_nobody_else() {
    let certificates = Certificates::new(GRID);
    let (other_ca, other_grid) = (Certificates::new(GRID), Certificates::new(GridId(8)));
    let issue = |from: &Certificates, role: Role| from.authority.issue(&role).unwrap();
    let own_key = KeyPair::generate().unwrap();
    let mut nameless = CertificateParams::new(vec!["host.test".to_string()]).unwrap();
    nameless.not_after = rcgen::date_time_ymd(2100, 1, 1);
    let nameless = Pair { certificate: nameless.self_signed(&own_key).unwrap().pem(), key: own_key.serialize_pem() };
    let cases = [
        ("another authority's host", Some(issue(&other_ca, Role::Host("a".into()))), "not of this grid's authority"),
        ("another grid's host", Some(issue(&other_grid, Role::Host("a".into()))), "not of this grid's authority"),
        ("a client of this grid", Some(issue(&certificates, Role::Client("vm".into()))), "client vm's"),
        ("one that signed itself", Some(nameless), "not of this grid's authority"),
        ("one without a certificate", None, "shows no certificate"),
    ];
    for (who, pair, why) in cases {
        let mut client = stranger(|_| {}, pair.as_ref());
        let mut node = certificates.node(3).accept().unwrap();
        client.send(b"let me in");
        let (at_client, at_node) = exchange(&mut client, &mut node);
        let error = at_node.unwrap_err();
        assert!(error.contains(why) && error.contains("; "), "{who}: {error}");
        assert_eq!(node.peer(), None, "{who}");
        assert!(at_client.unwrap_err().contains("its log says why"), "{who} is told");
    }
}

#[test]
fn nodes_connect_to_nodes_and_to_no_host() {
    let certificates = Certificates::new(GRID);
    let (four, role) = (Role::Node(NodeId(4)), Role::Host("a".into()));
    let door = certificates.node(4);
    let connecting = HostTls::load_node(&certificates.paths(&four), GRID, NodeId(4), &door).unwrap();
    let (mut caller, mut node) =
        (connecting.connect(Role::Node(NodeId(3))).unwrap(), certificates.node(3).accept().unwrap());
    caller.send(b"hello");
    let (at_caller, at_node) = exchange(&mut caller, &mut node);
    assert_eq!((at_caller, at_node), (Ok(Vec::new()), Ok(b"hello".to_vec())));
    assert_eq!(node.peer().unwrap().role, four);
    let host = ServerTls::load(&certificates.paths(&role), GRID, role.clone()).unwrap();
    let (mut caller, mut host) = (connecting.connect(role).unwrap(), host.accept().unwrap());
    caller.send(b"hello");
    let (_, at_host) = exchange(&mut caller, &mut host);
    let error = at_host.unwrap_err();
    assert!(error.contains("node 4's, and only hosts may connect to a host"), "{error}");
}

#[test]
fn a_host_goes_on_with_the_node_that_it_meant() {
    let (certificates, other) = (Certificates::new(GRID), Certificates::new(GRID));
    let host = certificates.host("a");
    for (node, why) in [
        (certificates.node(4), "node 4's, and node 3 should be there"),
        (other.node(3), "not of this grid's authority"),
    ] {
        let (mut host, mut node) = (host.connect(Role::Node(NodeId(3))).unwrap(), node.accept().unwrap());
        host.send(b"secret");
        let (at_host, at_node) = exchange(&mut host, &mut node);
        let error = at_host.unwrap_err();
        assert!(error.contains(why), "{error}");
        assert!(at_node.is_err(), "nothing was said to it");
    }
}

#[test]
fn other_credentials_count_from_the_next_session_on() {
    let certificates = Certificates::new(GRID);
    let (host, node) = (certificates.host("a"), certificates.node(1));
    let shown = |host: &HostTls, node: &ServerTls| {
        let (mut at_host, mut at_node) = (host.connect(Role::Node(NodeId(1))).unwrap(), node.accept().unwrap());
        let (ours, theirs) = exchange(&mut at_host, &mut at_node);
        assert!(ours.is_ok() && theirs.is_ok());
        let issued = |stream: &TlsStream| stream.peer_certificate().unwrap().0.to_vec();
        (issued(&at_host), issued(&at_node))
    };
    let before = shown(&host, &node);
    assert_eq!(shown(&host, &node), before);
    certificates.paths(&Role::Host("a".into()));
    certificates.paths(&Role::Node(NodeId(1)));
    assert_eq!(shown(&host, &node), before, "what lies there is not looked at before it is told");
    host.reload().unwrap();
    node.reload().unwrap();
    let after = shown(&host, &node);
    assert!(after.0 != before.0 && after.1 != before.1);
    // One that does not go with its key, as in the middle of being replaced.
    fs::write(&host.paths().key, certificates.authority.issue(&Role::Host("a".into())).unwrap().key).unwrap();
    assert!(host.reload().is_err());
    assert_eq!(shown(&host, &node), after);
}

#[test]
fn older_versions_are_refused() {
    let certificates = Certificates::new(GRID);
    let pair = certificates.authority.issue(&Role::Host("a".into())).unwrap();
    let certificate = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_client_auth_cert(vec![certificate], key)
        .unwrap();
    config.dangerous().set_certificate_verifier(Arc::new(Anybody));
    let name = ServerName::try_from("holdfast").unwrap();
    let mut client = TlsStream::over(UnbufferedClientConnection::new(Arc::new(config), name).unwrap().into(), true);
    let (_, at_node) = exchange(&mut client, &mut certificates.node(3).accept().unwrap());
    let error = at_node.unwrap_err();
    assert!(error.contains("TLS 1.3"), "{error}");
}

#[test]
fn garbage_and_endless_handshakes_end() {
    let certificates = Certificates::new(GRID);
    let node = certificates.node(3);
    let open = |bytes: &[u8]| node.accept().unwrap().on_ciphertext(&mut bytes.to_vec(), &mut Vec::new());
    for garbage in [&b"HFW1\x01\0\0\0"[..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 70_000], &[0; 5]] {
        assert!(matches!(open(garbage), Err(TlsError::Link(_))), "{:?}", &garbage[..4]);
    }
    // A handshake message that says that it is longer than any: refused, not waited for.
    assert!(open(b"\x16\x03\x01\x40\x00\x01\xff\xff\xff").is_ok(), "it is not whole yet");
    let record = [&b"\x16\x03\x01\x40\x00"[..], &[1, 0xff, 0xff, 0xff], &[0; 0x4000 - 4]].concat();
    assert!(open(&record).is_err());
    // One that stays within the bounds of messages, and never ends.
    let piece = [&b"\x16\x03\x01\x40\x00"[..], &[1, 0, 0xff, 0xff], &[0; 0x4000 - 4]].concat();
    let more = [&b"\x16\x03\x01\x40\x00"[..], &[0; 0x4000]].concat();
    assert!(open(&[piece, more.repeat(20)].concat()).is_err());
}

#[test]
fn credentials_of_another_are_not_taken() {
    let certificates = Certificates::new(GRID);
    let four = certificates.paths(&Role::Node(NodeId(4)));
    let error = ServerTls::load(&four, GRID, Role::Node(NodeId(3))).unwrap_err().to_string();
    assert!(error.contains("/node/4's") && error.contains("/node/3"), "{error}");
    let swapped = LinkPaths { key: certificates.paths(&Role::Node(NodeId(5))).key, ..four };
    assert!(matches!(ServerTls::load(&swapped, GRID, Role::Node(NodeId(4))), Err(TlsError::Mismatch { .. })));
}
