// Posts a body with Java's own HttpClient, over HTTP/2, and writes "VERSION STATUS BODY".
// Arguments: URL, a key store with the root (and a client's pair, if any), its password, a token.
import java.io.FileInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.security.KeyStore;
import javax.net.ssl.KeyManagerFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

public class Client {
    public static void main(String[] args) throws Exception {
        char[] password = args[2].toCharArray();
        KeyStore store = KeyStore.getInstance("PKCS12");
        try (FileInputStream file = new FileInputStream(args[1])) {
            store.load(file, password);
        }
        KeyManagerFactory keys = KeyManagerFactory.getInstance("PKIX");
        keys.init(store, password);
        TrustManagerFactory trusted = TrustManagerFactory.getInstance("PKIX");
        trusted.init(store);
        SSLContext tls = SSLContext.getInstance("TLS");
        tls.init(keys.getKeyManagers(), trusted.getTrustManagers(), null);
        HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(args[0]))
            .POST(HttpRequest.BodyPublishers.ofInputStream(() -> System.in));
        if (!args[3].isEmpty()) request.header("Authorization", "Bearer " + args[3]);
        HttpResponse<String> answer = HttpClient.newBuilder().sslContext(tls).build()
            .send(request.build(), HttpResponse.BodyHandlers.ofString());
        System.out.print(answer.version() + " " + answer.statusCode() + " " + answer.body());
    }
}
