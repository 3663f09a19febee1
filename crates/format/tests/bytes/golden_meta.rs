//! Records of the metadata store that are JSON, as each release wrote them: what these say is read for ever, and what a release
//! does not know stays in them.

use holdfast_base::VolumeId;
use holdfast_format::meta::{
    BeatRecord, CapacitySample, ClientsRecord, CloneRecord, CopiesRecord, DeletingRecord, ExportRecord, FloorsRecord,
    HostRecord, KEY_VERSION, KeyRecord, KeySource, LimitRecord, MachineRecord, NameRecord, NodeRecord, NumbersRecord,
    ReceivedRecord, RemovedRecord, ReservationRecord, ReservedRecord, SettingsRecord, TlsRecord, TokenRecord,
    TrashRecord, clients_key, clone_key, decode, deleting_key, encode, export_key, host_key, key_key, limit_key,
    machine_key, name_key, node_key, removed_key, settings_key, trash_key,
};
use holdfast_format::schedule::ScheduleRecord;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Where snapshots of a volume come from, and what is coming.
const RECEIVED: &str = concat!(
    r#"{"copies":[{"layer":2,"of":"00000000-0000-0000-0000-000000000007/1"}],"#,
    r#""partial":{"begin":{"version":1,"volume":"v","snapshot":"s2","id":"00000000-0000-0000-0000-000000000007/3","#,
    r#""from":["s1","00000000-0000-0000-0000-000000000007/1"],"size_bytes":4096,"layout":{"Mirror":{"copies":2}},"start":0},"#,
    r#""offset":9,"ticket":"t","is_ending":false}}"#
);

/// Read and written again it is the same, also with a field that nobody knows yet.
fn stays<T: Serialize + DeserializeOwned>(golden: &str) -> T {
    let record: T = decode(golden.as_bytes()).expect(golden);
    assert_eq!(String::from_utf8(encode(&record)).unwrap(), golden);
    let newer = format!("{},\"zz_newer\":{{\"a\":[1,null]}}}}", golden.strip_suffix('}').expect("an object"));
    let record_of_newer: T = decode(newer.as_bytes()).expect(&newer);
    assert_eq!(String::from_utf8(encode(&record_of_newer)).unwrap(), newer);
    record
}

#[test]
fn records_are_written_as_ever() {
    let name: NameRecord = stays(r#"{"volume":"00000000-0000-0000-0000-000000000007","host":"a","origin":""}"#);
    assert_eq!((name.host.as_str(), name.origin.as_deref()), ("a", Some("")));
    assert!(!name.protected);
    let name: NameRecord =
        stays(r#"{"volume":"00000000-0000-0000-0000-000000000007","host":"a","origin":"","protected":true}"#);
    assert!(name.protected);
    let export: ExportRecord = stays(r#"{"host":"a"}"#);
    assert!(export.offered_by.is_empty() && export.from.is_none());
    let export: ExportRecord = stays(r#"{"host":"b","portals":["a","b"],"from":"a"}"#);
    assert_eq!((export.offered_by.len(), export.from.as_deref()), (2, Some("a")));
    let export: ExportRecord = stays(r#"{"host":"b","shared":true}"#);
    assert!(export.shared && !export.failover);
    let export: ExportRecord = stays(r#"{"host":"b","failover":true}"#);
    assert!(export.failover);
    let schedule: ScheduleRecord = stays(r#"{"every":"1h","keep":["24h","7d"]}"#);
    assert_eq!((schedule.every.seconds(), schedule.keep.to_string()), (3600, "24h,7d".to_string()));
    let clone: CloneRecord =
        stays(r#"{"name":"c","origin":"00000000-0000-0000-0000-000000000007","size_bytes":1048576}"#);
    assert_eq!(clone, CloneRecord::new("c", VolumeId(7), 1 << 20));
    let trash: TrashRecord = stays(r#"{"name":"vm","taken_bytes":4096,"minutes":61}"#);
    assert_eq!((trash.taken_bytes, trash.minutes), (4096, 61));
    let _: DeletingRecord = stays(r#"{"volume":"00000000-0000-0000-0000-000000000007","name":"vm"}"#);
    let host: HostRecord = stays(
        r#"{"home":"m:/d","address":"127.0.0.1:7","reads_root":4,"answers":true,"runs_errands":true,"takes_spare":true}"#,
    );
    assert!(host.reads_root == 4 && !host.takes_requests);
    let host: HostRecord = stays(
        r#"{"home":"m:/d","reads_root":4,"answers":true,"runs_errands":true,"takes_spare":true,"takes_requests":true}"#,
    );
    assert!(host.takes_requests);
    let machine: MachineRecord = stays(
        r#"{"id":"7","home":"m:/d","address":"127.0.0.1:7","release":"0.1.0","started_s":5,"gone_s":6,"signs":true}"#,
    );
    assert!(machine.signs && machine.gone_s == Some(6) && machine.certificates_end_s.is_none());
    let removed: RemovedRecord = stays(
        r#"{"name":"b","id":"7","home":"m","nodes":[{"node":3,"devices":["x","y"]}],"removed_s":9,"by":"a","made_good":true}"#,
    );
    assert_eq!((removed.nodes[0].node, removed.nodes[0].devices.len(), removed.made_good), (3, 2, true));
    assert_eq!(encode(&SettingsRecord::default()), b"{}");
    assert_eq!(decode::<SettingsRecord>(b"{}").unwrap(), SettingsRecord::default());
    let settings: SettingsRecord = stays(r#"{"fixed":{"base_bytes":1,"left_bytes":2},"unchecked_reads":true}"#);
    assert!(
        settings.unchecked_reads
            && settings.reservation.is_some_and(|found| (found.base_bytes, found.left_bytes) == (1, 2))
    );
    let _: ReservationRecord = stays(r#"{"base_bytes":1,"left_bytes":2}"#);
    let clients: ClientsRecord = stays(r#"{"allowed":["a","b"]}"#);
    assert_eq!(clients.allowed.len(), 2);
    let limit: LimitRecord = stays(r#"{"limit":"iops=500"}"#);
    assert_eq!((limit.limit.as_str(), limit.qos), ("iops=500", None));
    let limit: LimitRecord = stays(r#"{"limit":"iops=500","qos":"weight=400,limit=500"}"#);
    assert_eq!(limit.qos.as_deref(), Some("weight=400,limit=500"));
    let key: KeyRecord = stays(r#"{"version":1,"nonce":"AA==","wrapped":"AQ==","source":{"file":"/k"}}"#);
    assert_eq!((key.version, key.source), (KEY_VERSION, KeySource::File("/k".into())));
    let key: KeyRecord = stays(r#"{"version":1,"nonce":"AA==","wrapped":"AQ==","source":{"command":"give k"}}"#);
    assert_eq!(key.source, KeySource::Command("give k".to_string()));
    let _: NumbersRecord = stays(r#"{"highest":3}"#);
    let _: CopiesRecord = stays(r#"{"number":3}"#);
    let node: NodeRecord = stays(
        r#"{"machine":"a","node":{"id":3,"address":"10.0.0.3:7420","devices":[{"path":"d/3.img","device":"x","size_bytes":9}]}}"#,
    );
    assert_eq!((node.node.id, node.node.devices.len()), (3, 1));
    assert_eq!(node_key(3), "node/00003");
    let received: ReceivedRecord = stays(RECEIVED);
    assert_eq!((received.copies.len(), received.partial.is_some()), (1, true));
    let tls: TlsRecord = stays(r#"{"authority":"ab"}"#);
    assert_eq!((tls.authority.as_str(), tls.certificate), ("ab", None));
    let _: TlsRecord = stays(r#"{"authority":"ab","certificate":"PEM"}"#);
    let token: TokenRecord = stays(r#"{"host":"a","valid_until":9}"#);
    assert_eq!(token.used_by, None);
    let token: TokenRecord = stays(r#"{"host":"a","valid_until":9,"used_by":"b"}"#);
    assert_eq!(token.used_by.as_deref(), Some("b"));
    let trend = r#"[{"at_ms":1,"taken_bytes":2}]"#;
    let samples: Vec<CapacitySample> = decode(trend.as_bytes()).unwrap();
    assert_eq!((samples.len(), encode(&samples)), (1, trend.as_bytes().to_vec()));
    let beat: BeatRecord = stays(
        r#"{"lineage":"00000000000000a1","since_s":9,"count":1,"marks":["00000000000000a1","00000000000000b2"]}"#,
    );
    assert_eq!((beat.count, beat.marks.len()), (1, 2));
    let host: HostRecord = stays(
        r#"{"home":"m:/d","reads_root":4,"answers":true,"runs_errands":true,"takes_spare":true,"knows_trash":true}"#,
    );
    assert!(host.knows_trash && !host.knows_operators && !host.knows_reactors);
    let host: HostRecord = stays(
        r#"{"home":"m","reads_root":4,"answers":true,"runs_errands":true,"takes_spare":true,"reactors":["a:8"],"knows_reactors":true}"#,
    );
    assert!(host.knows_reactors && host.reactors == ["a:8"] && host.features.is_empty());
    let host: HostRecord =
        stays(r#"{"home":"m","reads_root":5,"features":[1,2],"answers":true,"runs_errands":true,"takes_spare":true}"#);
    assert!(host.features == [1, 2]);
    let host: HostRecord = stays(
        r#"{"home":"m","reads_root":5,"answers":true,"runs_errands":true,"takes_spare":true,"knows_trash":true,"knows_operators":true}"#,
    );
    assert!(host.knows_operators);
    let _: ReservedRecord = stays(r#"{"changes":3}"#);
    let measured = r#"{"changes":3,"measured":{"a":{"iops":20000,"nodes":4,"at_s":1795242380,"zz":1}},"zz":1}"#;
    let floors: FloorsRecord = stays(measured);
    assert_eq!((floors.changes, floors.measured["a"].iops, floors.measured["a"].nodes), (3, 20_000, 4));
    let reserved: ReservedRecord =
        stays(r#"{"changes":4,"pending":{"00000000-0000-0000-0000-000000000007":{"layout":"mirror:2","bytes":9}}}"#);
    assert_eq!(reserved.pending.len(), 1);
}

#[test]
fn records_of_the_first_releases_are_read() {
    let name: NameRecord = decode(br#"{"volume":"7"}"#).unwrap();
    assert_eq!((name.host.as_str(), name.origin), ("", None));
    let export: ExportRecord = decode(b"{}").unwrap();
    assert_eq!(export, ExportRecord::default());
    let host: HostRecord = decode(br#"{"home":"m:/d"}"#).unwrap();
    assert!(host.reads_root == 0 && !host.answers && !host.runs_errands && !host.takes_spare);
}

#[test]
fn keys_are_as_ever() {
    let id = VolumeId(7);
    let keys = [name_key("vm"), export_key(id), clone_key(id), deleting_key("7"), host_key("a"), trash_key(id)];
    let volume = "volume/00000000-0000-0000-0000-000000000007";
    let trash = "trash/00000000-0000-0000-0000-000000000007";
    let golden = ["name/vm", &format!("{volume}/export"), &format!("{volume}/clone"), "deleting/7", "host/a", trash];
    assert_eq!(keys, golden.map(str::to_string));
    let key = "volume/00000000-0000-0000-0000-000000000007/key";
    let others = ["settings", "clients", "limits"].map(|kind| format!("{kind}/00000000-0000-0000-0000-000000000007"));
    assert_eq!(key_key(id), key);
    assert_eq!([settings_key(id), clients_key(id), limit_key(id)], others);
    assert_eq!([machine_key("a"), removed_key("7")], ["machine/a", "removed/7"].map(str::to_string));
}
